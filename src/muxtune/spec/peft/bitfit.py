"""BitFit's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.peft.targets import Targets, targeted, unmatched
from muxtune.spec.scalars import Flag


class BitFit(PeftBase):
    """Trained biases (Ben Zaken et al. 2021): those of the targeted linears, which get one where they have none, and -
    `norm_biases` - those of every norm that has one.

    The default learning rate was tried on SmolLM2 (docs/log.md): above it the held-out loss rises, below it none was
    tried.
    """

    default_learning_rate = 3e-3

    type: Literal["bitfit"] = "bitfit"
    target_modules: Targets = "all-linear"
    norm_biases: Flag = True

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        return unmatched(self.target_modules, places)

    def parameters(self, places: Iterable[Place]) -> int:
        places = tuple(places)
        norms = [place for place in places if self.norm_biases and place.kind == "norm" and place.biased]
        return sum(place.outputs for place in (*targeted(self.target_modules, places), *norms))

    def flops_per_token(self, places: Iterable[Place]) -> int:
        return 2 * self.parameters(places)  # one addition forward, one to the gradient
