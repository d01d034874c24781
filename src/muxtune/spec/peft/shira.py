"""SHiRA's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from muxtune.errors import ConfigError
from muxtune.spec.peft.base import ADAPTER_BYTES_PER_PARAMETER, PeftBase, Place
from muxtune.spec.peft.targets import Targets, targeted, unmatched
from muxtune.spec.scalars import Integer

_INDEX_BYTES = 8


class Shira(PeftBase):
    """A sparse delta of the weight (Bhardwaj et al. 2024): W' = W + S, where only some random places of S are trained.

    `r` says how many: as many as the numbers of a LoRA of rank r, r * (inputs + outputs). The job's seed draws them.

    The default learning rate was tried on SmolLM2 (docs/log.md): a third of it learns much slower; three times it was
    faster still in a run of 24 steps, which says nothing of long ones.
    """

    default_learning_rate = 3e-3

    type: Literal["shira"] = "shira"
    r: Annotated[Integer, Field(ge=1, le=65536)] = 8
    target_modules: Targets = "all-linear"

    def places_of(self, name: str, inputs: int, outputs: int) -> int:
        """Trained places of a weight. Raises ConfigError where the weight has fewer than `r` asks for."""
        count = self.r * (inputs + outputs)
        if count > inputs * outputs:
            raise ConfigError(
                f"r = {self.r} asks for {count:,} places of a weight that has {inputs * outputs:,}: {name}",
                where="peft.r",
                hint=f"for this weight r can be {inputs * outputs // (inputs + outputs)} at most",
            )
        return count

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        return unmatched(self.target_modules, places)

    def parameters(self, places: Iterable[Place]) -> int:
        own = targeted(self.target_modules, places)
        return sum(self.places_of(place.name, place.inputs, place.outputs) for place in own)

    def flops_per_token(self, places: Iterable[Place]) -> int:
        # A multiply-add is 2. Sparse products forward and to the input; the gradient is taken of the dense product.
        own = targeted(self.target_modules, places)
        dense = sum(2 * place.inputs * place.outputs for place in own)
        return 2 * 2 * self.parameters(own) + dense

    def state_bytes(self, places: Iterable[Place]) -> int:
        """With the row and column of every trained place."""
        return (ADAPTER_BYTES_PER_PARAMETER + 2 * _INDEX_BYTES) * self.parameters(places)
