"""Adapters over ranks: a rank builds the type's own adapter on its own, narrower operators.

What each parameter is to the ranks is said by rules (`muxtune.parallel.rules`). Start values are those of one device:
the whole adapter is made too, for a moment, and each rank takes its ranges; what depends on weights that lie on several
ranks is measured together (the lengths of a DoRA) or on one of them, a weight at a time (the components of a PiSSA).

The partial gradients are summed once an optimizer step, before clipping, in one exchange with what the norm needs of
the sharded ones (`GradientSum`). A whole parameter stays the same on all ranks because they do the same arithmetic.

Legend: as in `muxtune.peft`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muxtune.errors import AdapterError
from muxtune.models.backbone import Backbone
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.placement import Picked, Placement, Placements, own_part, places_in, put_part
from muxtune.parallel.rules import rule_of
from muxtune.parallel.slices import Slice
from muxtune.parallel.tensor import ShardedBackbone
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.dora import DoraAdapter
from muxtune.peft.pissa import PissaAdapter, blank, decomposed
from muxtune.peft.registry import build_adapter
from muxtune.peft.shira import PLACES, WEIGHT, shira_adapter
from muxtune.peft.targets import linears
from muxtune.spec.peft import Lora, PeftBase, Shira


@dataclass(frozen=True, slots=True)
class ShardedAdapter:
    """A rank's part of an adapter: its parameters are as wide as the rank's operators, under the names of the whole.

    Attributes:
        placements, fixed: of each parameter and fixed tensor, what of it is here.
        shapes: of the whole.
        constants: fixed tensors of the whole that nobody's part can be put together from.
    """

    adapter: Adapter
    placements: Mapping[str, Placement]
    fixed: Mapping[str, Placement]
    shapes: Mapping[str, torch.Size]
    axis: TensorAxis
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    def whole_state(self) -> dict[str, Tensor]:
        """All that makes the whole adapter what it is, on all ranks, which ask together. One exchange for each part."""
        views = {name: self._whole(name, view.detach()) for name, view in self.adapter.parameters.views.items()}
        fixed = {name: self._whole(name, self.adapter.fixed[name]) for name in self.fixed}
        return views | fixed | {name: value.clone() for name, value in self.constants.items()}

    def whole_gradient(self) -> dict[str, Tensor]:
        """The same of the gradients, which `GradientSum` has not summed yet."""
        found: dict[str, Tensor] = {}
        for name, view in self.adapter.parameters.views.items():
            assert view.grad is not None
            own = self._whole(name, view.grad)
            found[name] = self.axis.sum_(own) if self.placements[name] == "partial" else own
        return found

    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of the values of a whole adapter; all ranks do, together.

        Raises AdapterError where a constant differs.
        """
        for name, value in self.constants.items():
            if not torch.equal(state[name].cpu(), value):
                raise AdapterError(
                    "its trained places are others than a job of this seed draws",
                    where=name,
                    hint="tp: 1, or the seed of the job that it comes from",
                )
        placed = {**self.placements, **self.fixed}
        own = {name: own_part(state[name], placement) for name, placement in placed.items()}
        self.adapter.load(own | {name: self.adapter.fixed[name] for name in self.constants})

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of one tensor a parameter, as wide as the rank's, those of the whole adapter; all ranks ask together."""
        return {name: self._whole(name, value) for name, value in values.items()}

    def own(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rank's part of one tensor for each parameter of the whole adapter."""
        return {name: own_part(values[name], placement) for name, placement in self.placements.items()}

    def _whole(self, name: str, value: Tensor) -> Tensor:
        placement = self.placements[name] if name in self.placements else self.fixed[name]
        if isinstance(placement, str):
            return value.clone(memory_format=torch.contiguous_format)
        full = value.new_zeros(self.shapes[name])
        put_part(full, value, placement)
        return self.axis.sum_(full)


class GradientSum:
    """Makes a sharded adapter's gradient one that its ranks can step with: called once an optimizer step."""

    def __init__(self, sharded: ShardedAdapter) -> None:
        views, placements = sharded.adapter.parameters.views, sharded.placements
        self._axis = sharded.axis
        self._device = sharded.adapter.parameters.values.device
        self._sharded = [view for name, view in views.items() if not isinstance(placements[name], str)]
        self._partial = [view for name, view in views.items() if placements[name] == "partial"]
        self._whole = [view for name, view in views.items() if placements[name] == "whole"]

    def __call__(self) -> float:
        """Sum the partial gradients over the ranks, in place; the norm of the whole adapter's gradient, the same on all
        of them. One exchange, of the partial gradients and a number."""
        whole = self._squares(self._whole)
        if not self._partial and not self._sharded:
            return float(whole.sqrt())
        partial = [_gradient(view) for view in self._partial]
        squares = self._squares(self._sharded)
        # in the gradients' own precision: they are most of what goes over the link between a slot and the next
        flat = [one.reshape(-1) for one in partial]
        dtype = flat[0].dtype if flat else torch.float64
        told = self._axis.sum_(torch.cat([*flat, squares.reshape(1).to(dtype)]))
        start = 0
        for one in partial:
            one.copy_(told[start : start + one.numel()].view(one.shape))
            start += one.numel()
        return float((told[-1].double() + told[:start].double().square().sum() + whole).sqrt())

    def _squares(self, views: list[Tensor]) -> Tensor:
        """The sum of squares of their gradients."""
        if not views:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([_gradient(view).square().sum().double() for view in views]).sum()


def as_it_is(backbone: Backbone) -> BackboneView:
    """All of a backbone."""
    return backbone


def sharded_adapter(
    spec: PeftBase,
    backbone: ShardedBackbone,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    view: Callable[[Backbone], BackboneView] = as_it_is,
) -> ShardedAdapter:
    """This rank's part of a fresh adapter, with the start values of `build_adapter` on one device; `view` says of what
    in the backbone. All ranks make theirs together: some starts are measured by all.

    Raises AdapterError as that does, and for a type that has no rule here.
    """
    rule = rule_of(spec)
    whole = build_adapter(spec, view(backbone.whole), seed=seed, dtype=dtype, device=torch.device("cpu"))
    if isinstance(spec, Shira):
        return _shira(whole, backbone, device)
    if isinstance(spec, Lora) and spec.pissa:
        return _pissa(spec, whole, backbone, device)
    adapter = build_adapter(spec, view(backbone), seed=seed, dtype=dtype, device=device)
    sharded = _placed(adapter, rule(adapter, backbone), whole, backbone)
    if all(isinstance(placement, str) for placement in sharded.placements.values()):
        return sharded  # nothing of it is a part, so it starts as on one device, from weights that all ranks have
    sharded.load_whole(whole.state())
    if isinstance(adapter, DoraAdapter):
        adapter.start()  # the whole knows no weights, and so no lengths
    return sharded


def _placed(adapter: Adapter, placements: Placements, whole: Adapter, backbone: ShardedBackbone) -> ShardedAdapter:
    views, fixed = adapter.parameters.views, adapter.fixed
    assert placements.keys() == views.keys() | fixed.keys(), "a parameter without a rule"
    shapes = {name: shape for name, (shape, _) in whole.layout.items()}
    own = {name: placements[name] for name in views}
    return ShardedAdapter(adapter, own, {name: placements[name] for name in fixed}, shapes, backbone.axis)


def _pissa(spec: Lora, whole: Adapter, backbone: ShardedBackbone, device: torch.device) -> ShardedAdapter:
    """The first rank decomposes each weight, put together for that moment, and tells the others."""
    ops, axis = linears(backbone), backbone.axis
    precise = whole.parameters.values.dtype
    adapter = PissaAdapter(
        [ops[name] for name in whole.modules],
        r=spec.r,
        scale=spec.scaling,
        dropout=spec.lora_dropout,
        dtype=precise,
        device=device,
        start=blank,
    )
    sharded = _placed(adapter, rule_of(spec)(adapter, backbone), whole, backbone)
    found: dict[str, Tensor] = {}
    for name, op in linears(backbone.whole).items():
        if name not in adapter.modules:
            continue
        weight_OI = _gathered(ops[name].weight_OI.to(precise), backbone, name)
        a_RI, b_OR = blank(op, spec.r, spec.scaling, precise)
        if axis.rank == 0:
            a_RI, b_OR = decomposed(weight_OI, spec.r, spec.scaling)
        a_RI, b_RO = axis.sum_(a_RI), axis.sum_(b_OR.T)
        found |= {f"{name}.{leaf}": a_RI for leaf in ("lora_A", "start_A")}
        found |= {f"{name}.{leaf}": b_RO.T for leaf in ("lora_B", "start_B")}
    sharded.load_whole(found)
    return sharded


def _gathered(weight_OI: Tensor, backbone: ShardedBackbone, name: str) -> Tensor:
    """A linear's whole weight."""
    cut = backbone.cuts.get(name)
    if cut is None:
        return weight_OI
    dim = 0 if cut.side == "out" else 1
    shape = list(weight_OI.shape)
    shape[dim] = cut.full
    full_OI = weight_OI.new_zeros(shape)
    put_part(full_OI, weight_OI, Slice(dim, cut.ranges))
    return backbone.axis.sum_(full_OI)


def _shira(whole: Adapter, backbone: ShardedBackbone, device: torch.device) -> ShardedAdapter:
    """The places that the whole draws, as far as they lie in the rank's part. Ranges keep their order."""
    ops, placements, places = linears(backbone), dict[str, Placement](), dict[str, Tensor]()
    for name in whole.modules:
        places_2P, cut = whole.fixed[f"{name}.{PLACES}"], backbone.cuts.get(name)
        if cut is None:
            placements[f"{name}.{WEIGHT}"], places[name] = "whole", places_2P.to(device)
            continue
        row = 0 if cut.side == "out" else 1
        index_p, local_p = places_in(cut.ranges, cut.full, places_2P[row])
        own_2p = places_2P[:, index_p]
        own_2p[row] = local_p
        placements[f"{name}.{WEIGHT}"], places[name] = Picked(index_p), own_2p.to(device)
    adapter = shira_adapter([ops[name] for name in whole.modules], places, whole.parameters.values.dtype, device)
    shapes = {name: shape for name, (shape, _) in whole.layout.items()}
    return ShardedAdapter(adapter, placements, {}, shapes, backbone.axis, dict(whole.fixed))


def _gradient(view: Tensor) -> Tensor:
    assert view.grad is not None
    return view.grad
