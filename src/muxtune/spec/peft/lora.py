"""LoRA's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.peft.targets import Targets, targeted, unmatched
from muxtune.spec.scalars import Integer, Number, clip, read_flag


class Lora(PeftBase):
    """Low-rank adaptation (Hu et al. 2021): y = W x + (lora_alpha / r) B A dropout(x)."""

    default_learning_rate = 2e-4

    type: Literal["lora"] = "lora"
    r: Annotated[Integer, Field(ge=1, le=65536)] = 8
    lora_alpha: Annotated[Number, Field(gt=0)] = 16
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0
    target_modules: Targets = "all-linear"

    @model_validator(mode="before")
    @classmethod
    def _refuse_variants(cls, data: object) -> object:
        """LoRA's kin are named by these keys; at their plain value they say nothing, at another they are to come."""
        if not isinstance(data, dict):
            return data
        for key in ("use_dora", "use_rslora"):
            if key in data and read_flag(data[key]):
                raise ConfigError("is not supported yet", where=key, hint="supported: plain lora")
        if str(data.get("init_lora_weights", True)).lower() != "true":
            raise ConfigError(
                f"{clip(data['init_lora_weights'])} is not supported yet",
                where="init_lora_weights",
                hint="supported: true",
            )
        return {k: v for k, v in data.items() if k not in ("use_dora", "use_rslora", "init_lora_weights")}

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.r

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        return unmatched(self.target_modules, places)

    def parameters(self, places: Iterable[Place]) -> int:
        return sum(self.r * (place.inputs + place.outputs) for place in targeted(self.target_modules, places))

    def flops_per_token(self, places: Iterable[Place]) -> int:
        # A multiply-add is 2; forward, the input's gradient and the parameters' gradient cost the same product each.
        return 3 * 2 * self.parameters(places)
