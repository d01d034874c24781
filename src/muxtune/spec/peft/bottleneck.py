"""Settings of bottleneck adapters, in three placements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.scalars import Integer, Number, choice

Placement = Literal["houlsby", "pfeiffer", "parallel"]
NonLinearity = Literal["relu", "gelu", "swish", "tanh"]

_ROLES: Mapping[Placement, tuple[str, ...]] = {
    "houlsby": ("o", "mlp_out"),
    "pfeiffer": ("mlp_out",),
    "parallel": ("mlp",),
}


class Bottleneck(PeftBase):
    """A two-layer network of few units: h += scaling * (U f(D h + a) + b).

    `placement` says what h is: the outputs of attention and of the feed-forward sublayer (`houlsby`, Houlsby et al.
    2019), the latter alone (`pfeiffer`, Pfeiffer et al. 2020), or - `parallel`, He et al. 2021 - the network reads the
    sublayer's input and adds to its output. It is `bottleneck_size` units wide, or the model's width over
    `reduction_factor` where no size is given.

    The default learning rate was tried on SmolLM2 (docs/log.md): a third of it learns much slower after the sublayers;
    beside the MLP (`parallel`) three times it learns faster still.
    """

    default_learning_rate = 3e-3

    type: Literal["bottleneck"] = "bottleneck"
    placement: Annotated[Placement, BeforeValidator(choice("houlsby", "pfeiffer", "parallel"))] = "pfeiffer"
    reduction_factor: Annotated[Number, Field(ge=1, le=65536)] = 16
    bottleneck_size: Annotated[Integer, Field(ge=1, le=65536)] | None = None
    non_linearity: Annotated[
        NonLinearity, BeforeValidator(choice("relu", "gelu", "swish", "tanh", aliases={"silu": "swish"}))
    ] = "relu"
    scaling: Annotated[Number, Field(gt=0, le=1e6)] = 1

    @property
    def roles(self) -> tuple[str, ...]:
        """Of the attach points it hooks."""
        return _ROLES[self.placement]

    def size(self, width: int) -> int:
        """Units of an adapter on rows of `width`."""
        return self.bottleneck_size or max(1, int(width / self.reduction_factor))

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        present = {role for place in places for role in place.roles}
        return tuple(f"an operator of role {role} ({self.placement})" for role in self.roles if role not in present)

    def parameters(self, places: Iterable[Place]) -> int:
        return sum(products + size + place.outputs for place, size, products in self._sizes(places))

    def flops_per_token(self, places: Iterable[Place]) -> int:
        # A multiply-add is 2; forward, the input's gradient and the parameters' gradient cost the same product each.
        return sum(3 * 2 * products for _, _, products in self._sizes(places))

    def _sizes(self, places: Iterable[Place]) -> list[tuple[Place, int, int]]:
        """Of each attach point it hooks: the place, its units and the numbers in both matrices."""
        own = [place for place in places if not place.roles.isdisjoint(self.roles)]
        return [(place, size := self.size(place.outputs), 2 * size * place.outputs) for place in own]
