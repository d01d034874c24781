"""Norm tuning's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.peft.targets import NormTargets, targeted, unmatched

_NORM_FLOPS = 8  # of one normalised number: mean, variance, shift, scale


class LnTuning(PeftBase):
    """Trained norms (PEFT's LN_TUNING; Zhao et al. 2023): the weight, and the bias where there is one, of each targeted
    norm.

    The default learning rate was tried on SmolLM2 (docs/log.md): three times it is too much.
    """

    default_learning_rate = 1e-2

    type: Literal["ln_tuning"] = "ln_tuning"
    target_modules: NormTargets = "all-norms"

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        return unmatched(self.target_modules, places, "norm")

    def parameters(self, places: Iterable[Place]) -> int:
        return sum(place.outputs * (2 if place.biased else 1) for place in self._targeted(places))

    def flops_per_token(self, places: Iterable[Place]) -> int:
        # The task's rows are normalised once more with its own weights, there and back.
        return sum(3 * _NORM_FLOPS * place.outputs for place in self._targeted(places))

    def _targeted(self, places: Iterable[Place]) -> list[Place]:
        return targeted(self.target_modules, places, "norm")
