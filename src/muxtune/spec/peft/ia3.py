"""IA3's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.peft.targets import ALL_LINEAR, Names, Targets, targeted, unmatched

_SCALED = frozenset({"k", "v", "mlp_out"})
_FEEDFORWARD = "mlp_out"


class Scaled(NamedTuple):
    """The linears whose output is scaled, and those whose input is."""

    outputs: list[Place]
    inputs: list[Place]


class IA3(PeftBase):
    """(IA)^3 (Liu et al. 2022): inner activations scaled by learned vectors - the output of the targeted linears, and
    the input of those that are feed-forward.

    By default keys and values are scaled, and what goes into the MLP's last linear; a fused linear is scaled whole, as
    in PEFT. A recipe of the family must say which those are; elsewhere `target_modules` does.

    The default learning rate is fifty times LoRA's, since a vector that starts at one has far to go.
    """

    default_learning_rate = 1e-2

    type: Literal["ia3"] = "ia3"
    target_modules: Targets | None = None  # None: by the roles k, v and mlp_out
    feedforward_modules: Names | None = None  # of the targets; None: by the role mlp_out

    def scaled(self, places: Iterable[Place]) -> Scaled:
        """The linears among all attach points that the settings choose."""
        chosen = self._chosen(places)
        if self.feedforward_modules is None:
            inputs = [place for place in chosen if _FEEDFORWARD in place.roles]
        else:
            inputs = targeted(self.feedforward_modules, chosen)
        names = {place.name for place in inputs}
        return Scaled([place for place in chosen if place.name not in names], inputs)

    def resolved(self, places: Iterable[Place]) -> Self:
        """By full names, of those whose input is scaled too: two that scale the same modules alike are then equal."""
        outputs, inputs = ([place.name for place in chosen] for chosen in self.scaled(places))
        named = {"target_modules": tuple(sorted(outputs + inputs)), "feedforward_modules": tuple(sorted(inputs))}
        return self.model_copy(update=named)

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        places = tuple(places)
        missing = unmatched(self.target_modules or ALL_LINEAR, places)
        return missing + unmatched(self.feedforward_modules or (), self._chosen(places))

    def parameters(self, places: Iterable[Place]) -> int:
        scaled = self.scaled(places)
        return sum(place.outputs for place in scaled.outputs) + sum(place.inputs for place in scaled.inputs)

    def flops_per_token(self, places: Iterable[Place]) -> int:
        return 4 * self.parameters(places)  # one product forward, one to the input, one and a sum to the vector

    def _chosen(self, places: Iterable[Place]) -> list[Place]:
        if self.target_modules is not None:
            return targeted(self.target_modules, places)
        return [place for place in places if place.kind == "linear" and place.roles & _SCALED]
