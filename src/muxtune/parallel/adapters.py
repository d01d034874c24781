"""Adapters over ranks, by rules that follow from how each BaseOp is cut. No type knows of ranks.

A rank builds the type's own adapter on its own, narrower operators. What each parameter is to the ranks:

    sharded    each rank has the ranges that its operator has      its gradient is whole
    partial    all ranks have it; each sees a part of the work     its gradient is a part of a sum
    whole      all ranks have it and do the same work with it      its gradient is whole

                       column-parallel (outputs cut)      row-parallel (inputs cut)
    LoRA               A partial, B sharded               A sharded, B partial; before the operator's own sum
    IA3 on outputs     sharded                            whole, on the sum
    IA3 on inputs      partial                            sharded
    BitFit             sharded                            whole, on the sum
    bottleneck         -                                  whole, on the sum
    norm tuning        whole
    prefix             sharded, by key/value heads
    prompt             whole

Start values are those of one device: the whole adapter is made too, for a moment, and each rank takes its ranges. The
partial gradients are summed once an optimizer step, before clipping, in one exchange with what the norm needs of the
sharded ones (`GradientSum`). A whole parameter stays the same on all ranks because they do the same arithmetic.

Legend: as in `muxtune.peft`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from muxtune.errors import AdapterError
from muxtune.models.backbone import Backbone
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.shard import Cut
from muxtune.parallel.slices import Slice
from muxtune.parallel.tensor import ShardedBackbone, summed_name
from muxtune.peft.base import Adapter, AdapterModule, BackboneView
from muxtune.peft.ia3 import IA3Adapter
from muxtune.peft.lora import LoraModule
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import (
    IA3,
    PEFT_SPECS,
    BitFit,
    Bottleneck,
    LnTuning,
    Lora,
    PeftBase,
    PrefixTuning,
    PromptTuning,
    type_name,
)

Placement = Slice | Literal["partial", "whole"]
Placements = dict[str, Placement]  # by parameter name
_Rule = Callable[[Adapter, ShardedBackbone], Placements]


@dataclass(frozen=True, slots=True)
class ShardedAdapter:
    """A rank's part of an adapter: its parameters are as wide as the rank's operators, under the names of the whole."""

    adapter: Adapter
    placements: Mapping[str, Placement]
    shapes: Mapping[str, torch.Size]  # of the whole
    axis: TensorAxis

    def whole_state(self) -> dict[str, Tensor]:
        """Every parameter of the whole adapter, on all ranks, which ask together. One exchange a sharded parameter."""
        return {name: self._whole(name, view.detach()) for name, view in self.adapter.parameters.views.items()}

    def whole_gradient(self) -> dict[str, Tensor]:
        """The same of the gradients, which `GradientSum` has not summed yet."""
        found: dict[str, Tensor] = {}
        for name, view in self.adapter.parameters.views.items():
            assert view.grad is not None
            own = self._whole(name, view.grad)
            found[name] = self.axis.sum_(own) if self.placements[name] == "partial" else own
        return found

    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's ranges of the values of a whole adapter."""
        self.adapter.load({name: _own(state[name], self.placements[name]) for name in self.placements})

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of one tensor a parameter, as wide as the rank's, those of the whole adapter; all ranks ask together."""
        return {name: self._whole(name, value) for name, value in values.items()}

    def own(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rank's ranges of one tensor for each parameter of the whole adapter."""
        return {name: _own(values[name], placement) for name, placement in self.placements.items()}

    def _whole(self, name: str, value: Tensor) -> Tensor:
        placement = self.placements[name]
        if not isinstance(placement, Slice):
            return value.clone(memory_format=torch.contiguous_format)
        full, start = value.new_zeros(self.shapes[name]), 0
        for own in placement.ranges:
            full.narrow(placement.dim, own.start, len(own)).copy_(value.narrow(placement.dim, start, len(own)))
            start += len(own)
        return self.axis.sum_(full)


class GradientSum:
    """Makes a sharded adapter's gradient one that its ranks can step with: called once an optimizer step."""

    def __init__(self, sharded: ShardedAdapter) -> None:
        views, placements = sharded.adapter.parameters.views, sharded.placements
        self._axis = sharded.axis
        self._sharded = [view for name, view in views.items() if isinstance(placements[name], Slice)]
        self._partial = [view for name, view in views.items() if placements[name] == "partial"]
        self._whole = [view for name, view in views.items() if placements[name] == "whole"]

    def __call__(self) -> float:
        """Sum the partial gradients over the ranks, in place; the norm of the whole adapter's gradient, the same on all
        of them. One exchange, of the partial gradients and a number."""
        whole = _squares([_gradient(view) for view in self._whole])
        if not self._partial and not self._sharded:
            return float(whole.sqrt())
        partial = [_gradient(view) for view in self._partial]
        squares = _squares([_gradient(view) for view in self._sharded])
        told = self._axis.sum_(torch.cat([*(one.reshape(-1).double() for one in partial), squares.reshape(1)]))
        start = 0
        for one in partial:
            one.copy_(told[start : start + one.numel()].view(one.shape))
            start += one.numel()
        return float((told[-1] + told[:start].square().sum() + whole).sqrt())


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
    in the backbone.

    Raises AdapterError as that does, and for a type or a target that has no rule here.
    """
    rule = _rule_of(spec, backbone)
    adapter = build_adapter(spec, view(backbone), seed=seed, dtype=dtype, device=device)
    placements = rule(adapter, backbone)
    assert placements.keys() == adapter.parameters.views.keys(), "a parameter without a rule"
    shapes = {name: view.shape for name, view in adapter.parameters.views.items()}
    if not any(isinstance(placement, Slice) for placement in placements.values()):
        return ShardedAdapter(adapter, placements, shapes, backbone.axis)
    whole = build_adapter(spec, view(backbone.whole), seed=seed, dtype=dtype, device=torch.device("cpu"))
    shapes = {name: view.shape for name, view in whole.parameters.views.items()}
    sharded = ShardedAdapter(adapter, placements, shapes, backbone.axis)
    sharded.load_whole(whole.state())
    return sharded


def _rule_of(spec: PeftBase, backbone: ShardedBackbone) -> _Rule:
    rule = _RULES.get(type(spec))
    variant = isinstance(spec, Lora) and (spec.use_dora or spec.pissa)
    if rule is None or variant:
        raise AdapterError(
            f"{type_name(spec)} adapters cannot be split over ranks yet",
            hint="tp: 1, or one of the types " + ", ".join(name for name, kind in PEFT_SPECS.items() if kind in _RULES),
        )
    return rule


def _lora(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    found: Placements = {}
    for name, module in adapter.modules.items():
        if name == backbone.embedding.name:
            raise AdapterError(
                "LoRA on the token embedding cannot be split over ranks yet", hint="leave it out, or tp: 1"
            )
        cut = backbone.cuts.get(name)
        first, second = f"{name}.lora_A", f"{name}.lora_B"
        if cut is None:
            found[first] = found[second] = "whole"
        elif cut.side == "out":
            found[first], found[second] = "partial", Slice(0, cut.ranges)
        else:
            found[first], found[second] = Slice(1, cut.ranges), "partial"
            assert isinstance(module, LoraModule)
            module.first_channel = cut.ranges[0].start
    return found


def _ia3(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    assert isinstance(adapter, IA3Adapter)
    found: Placements = {}
    for name in adapter.modules:
        cut = backbone.cuts.get(name)
        of_inputs = name in adapter.inputs
        if cut is None:
            found[f"{name}.ia3_l"] = "whole"
        elif of_inputs:
            found[f"{name}.ia3_l"] = Slice(0, cut.ranges) if cut.side == "in" else "partial"
        else:
            found[f"{name}.ia3_l"] = _on_outputs(cut)
    _behind_sums(adapter, backbone, leave=adapter.inputs)
    return found


def _bitfit(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    found: Placements = {f"{name}.bias": _on_outputs(backbone.cuts.get(name)) for name in adapter.modules}
    _behind_sums(adapter, backbone)
    return found


def _bottleneck(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    _behind_sums(adapter, backbone)
    return _all_whole(adapter, backbone)


def _prefix(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    groups, width = backbone.part.groups, backbone.sizes.head_width
    own = Slice(1, (range(groups.start * width, groups.stop * width),))
    return dict.fromkeys(adapter.parameters.views, own)


def _all_whole(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    return dict.fromkeys(adapter.parameters.views, "whole")


_RULES: Mapping[type, _Rule] = {
    Lora: _lora,
    IA3: _ia3,
    BitFit: _bitfit,
    Bottleneck: _bottleneck,
    LnTuning: _all_whole,
    PrefixTuning: _prefix,
    PromptTuning: _all_whole,
}


def _on_outputs(cut: Cut | None) -> Placement:
    """Of a vector over an operator's outputs."""
    return Slice(0, cut.ranges) if cut is not None and cut.side == "out" else "whole"


def _behind_sums(adapter: Adapter, backbone: ShardedBackbone, leave: frozenset[str] = frozenset()) -> None:
    """Let the modules at row-parallel linears hook the sum, but for those in `leave`."""
    modules: dict[str, AdapterModule] = {}
    for name, module in adapter.modules.items():
        cut = backbone.cuts.get(name)
        moved = cut is not None and cut.side == "in" and name not in leave
        modules[summed_name(name) if moved else name] = module
    adapter.modules = modules


def _own(value: Tensor, placement: Placement) -> Tensor:
    return placement.of(value) if isinstance(placement, Slice) else value


def _gradient(view: Tensor) -> Tensor:
    assert view.grad is not None
    return view.grad


def _squares(gradients: list[Tensor]) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([one.square().sum().double() for one in gradients]).sum() if gradients else zero
