"""What each parameter of an adapter is to the ranks: by type, from how each BaseOp is cut. No type knows of ranks.

                       column-parallel (outputs cut)      row-parallel (inputs cut)
    LoRA, PiSSA        A partial, B sharded               A sharded, B partial; before the operator's own sum
    DoRA               the same; lengths sharded          lengths partial, and the squares of the norms are summed
    SHiRA              the rank's places                  the rank's places
    IA3 on outputs     sharded                            whole, on the sum
    IA3 on inputs      partial                            sharded
    BitFit             sharded                            whole, on the sum
    bottleneck         -                                  whole, on the sum
    norm tuning        whole
    prefix             sharded, by key/value heads
    prompt             whole
    LoRA, embedding    whole: it adds to rows that all ranks have, behind the sum

A rule also fits the adapter's modules to their part: which rows they hook, where their first channel is.

The boundary: names and placements; values and gradients are `muxtune.parallel.adapters`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from muxtune.errors import AdapterError
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.placement import Placement, Placements
from muxtune.parallel.shard import Cut
from muxtune.parallel.slices import Slice
from muxtune.parallel.tensor import ShardedBackbone, summed_name
from muxtune.peft.base import Adapter, AdapterModule
from muxtune.peft.dora import DoraAdapter
from muxtune.peft.ia3 import IA3Adapter
from muxtune.peft.lora import EMBEDDING_A, EMBEDDING_B, LowRankModule
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
    Shira,
    type_name,
)

Rule = Callable[[Adapter, ShardedBackbone], Placements]


def rule_of(spec: PeftBase) -> Rule:
    """The type's rule. Raises AdapterError where it has none (a type that has been added since)."""
    rule = RULES.get(type(spec))
    if rule is None:
        raise AdapterError(
            f"{type_name(spec)} adapters cannot be split over ranks",
            hint="tp: 1, or one of the types " + ", ".join(name for name, kind in PEFT_SPECS.items() if kind in RULES),
        )
    return rule


def _shira(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    raise AssertionError("a rank's part of a SHiRA is made with its placements")


def _lora(adapter: Adapter, backbone: ShardedBackbone) -> Placements:
    found: Placements = {}
    partial_norms: list[str] = []
    for name, module in adapter.modules.items():
        if name == backbone.embedding.name:
            found[f"{name}.{EMBEDDING_A}"] = found[f"{name}.{EMBEDDING_B}"] = "whole"
            continue
        cut = backbone.cuts.get(name)
        placed = _pair(cut)
        found |= {f"{name}.{leaf}": placement for leaf, placement in placed.items()}
        if cut is not None and cut.side == "in":
            assert isinstance(module, LowRankModule)
            module.first_channel = cut.ranges[0].start
            partial_norms.append(name)
    if isinstance(adapter, DoraAdapter):
        adapter.sum_squares = _SquareSum(partial_norms, backbone.axis)
    held = adapter.parameters.views.keys() | adapter.fixed.keys()
    return {name: placement for name, placement in found.items() if name in held}


def _pair(cut: Cut | None) -> Placements:
    """Of a pair and what goes with it: the lengths of a DoRA, the start of a PiSSA."""
    if cut is None:
        names = ("lora_A", "lora_B", "lora_magnitude_vector", "start_A", "start_B")
        return dict.fromkeys(names, "whole")
    if cut.side == "out":
        own: Placement = Slice(0, cut.ranges)
        return {
            "lora_A": "partial",
            "lora_B": own,
            "lora_magnitude_vector": own,
            "start_A": "whole",
            "start_B": own,
        }
    own = Slice(1, cut.ranges)
    return {
        "lora_A": own,
        "lora_B": "partial",
        "lora_magnitude_vector": "partial",
        "start_A": own,
        "start_B": "whole",
    }


class _SquareSum:
    """Sums the squares of rows that lie on several ranks, those of all operators at once."""

    def __init__(self, names: list[str], axis: TensorAxis) -> None:
        self._names, self._axis = names, axis

    def __call__(self, squares: dict[str, Tensor]) -> None:
        if not self._names:
            return
        own = [squares[name] for name in self._names]
        summed = self._axis.sum_(torch.cat(own))
        for one, told in zip(own, summed.split([len(one) for one in own]), strict=True):
            one.copy_(told)


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


RULES: Mapping[type, Rule] = {
    Lora: _lora,
    IA3: _ia3,
    BitFit: _bitfit,
    Bottleneck: _bottleneck,
    LnTuning: _all_whole,
    PrefixTuning: _prefix,
    PromptTuning: _all_whole,
    Shira: _shira,
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
