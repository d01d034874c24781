"""LoRA's settings, and those of its kin: rsLoRA, DoRA, PiSSA."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.peft.base import ADAPTER_BYTES_PER_PARAMETER, Kind, PeftBase, Place
from muxtune.spec.peft.targets import ENDS, Targets, targeted, unmatched
from muxtune.spec.scalars import Flag, Integer, Number, clip, read_flag

_FROZEN_BYTES_PER_NUMBER = 4  # fp32, neither gradient nor moments


def _read_init(value: object) -> object:
    """`true`, or `pissa`; peft's other initialisations are refused by name."""
    if isinstance(value, str) and value.lower() == "pissa":
        return "pissa"
    try:
        usual = read_flag(value)
    except ConfigError:
        usual = False
    if not usual:
        raise ConfigError(f"{clip(value)} is not supported", hint="supported: true, pissa")
    return True


class Lora(PeftBase):
    """Low-rank adaptation (Hu et al. 2021): y = W x + s B A dropout(x), with s = lora_alpha / r.

    use_rslora: rank-stabilised (Kalajdzievski 2023): s = lora_alpha / sqrt(r).
    use_dora: weight-decomposed (Liu et al. 2024): the rows of W + s B A scaled to trained lengths.
    init_lora_weights: pissa (Meng et al. 2024): B A starts as the weight's r principal components, and what is trained
    is its difference from them, so that the shared weight stays as it is.

    `target_modules` may name the token embedding and the head beside linears (not of a DoRA or PiSSA): the embedding's
    pair is added to looked-up rows, without dropout; the head's to the logits. Where the model ties both to one weight,
    they are two pairs all the same.

    The default learning rate is that of peft's and its authors' examples for all four.
    """

    default_learning_rate = 2e-4

    type: Literal["lora"] = "lora"
    r: Annotated[Integer, Field(ge=1, le=65536)] = 8
    lora_alpha: Annotated[Number, Field(gt=0)] = 16
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0
    target_modules: Targets = "all-linear"
    use_rslora: Flag = False
    use_dora: Flag = False
    init_lora_weights: Annotated[Literal[True, "pissa"], BeforeValidator(_read_init)] = True

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.use_dora and self.pissa:
            raise ConfigError("does not go with use_dora", where="init_lora_weights", hint="leave one of them out")
        return self

    @property
    def pissa(self) -> bool:
        return self.init_lora_weights == "pissa"

    @property
    def label(self) -> str:
        if self.use_dora or self.pissa:
            return "dora" if self.use_dora else "pissa"
        return "rslora" if self.use_rslora else self.type

    @property
    def scaling(self) -> float:
        return self.lora_alpha / (sqrt(self.r) if self.use_rslora else self.r)

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        return unmatched(self.target_modules, places, *self._kinds)

    def parameters(self, places: Iterable[Place]) -> int:
        chosen = self._targeted(places)
        magnitudes = sum(place.outputs for place in chosen) if self.use_dora else 0
        return self._matrices(chosen) + magnitudes

    def flops_per_token(self, places: Iterable[Place]) -> int:
        """Products alone; a multiply-add is 2. Forward, the input's gradient and the parameters' gradient cost the same
        product each; PiSSA's frozen pair has no third. A DoRA whose input drops out asks the weight once more, both
        ways; the norms of its rows are made once a step, not once a token. The embedding's A is looked up: there is no
        product with its entries, and no gradient of an input. The head runs on trained tokens alone."""
        chosen = self._targeted(places)
        looked_up = sum(self.r * place.inputs for place in chosen if place.kind == "embedding")
        products = (3 + 2 * self.pissa) * (self._matrices(chosen) - looked_up)
        if self.use_dora and self.lora_dropout > 0:
            products += 2 * sum(place.inputs * place.outputs for place in chosen)
        return 2 * products

    def state_bytes(self, places: Iterable[Place]) -> int:
        chosen = self._targeted(places)
        frozen = self._matrices(chosen) if self.pissa else 0
        if self.use_dora:  # norms of W's rows, and of the adapted ones
            frozen = 2 * sum(place.outputs for place in chosen)
        return ADAPTER_BYTES_PER_PARAMETER * self.parameters(chosen) + _FROZEN_BYTES_PER_NUMBER * frozen

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return ("linear",) if self.use_dora or self.pissa else ("linear", *ENDS)

    def _targeted(self, places: Iterable[Place]) -> list[Place]:
        return targeted(self.target_modules, places, *self._kinds)

    def _matrices(self, chosen: Iterable[Place]) -> int:
        return sum(self.r * (place.inputs + place.outputs) for place in chosen)
