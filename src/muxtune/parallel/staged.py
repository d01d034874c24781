"""Adapters over stages: each stage has the parameters of its own operators, under the names of the whole.

    at a layer's operators, a prefix    the stage of the layer
    at the token embedding, a prompt    the first stage
    at the final norm, at the head      the last one

A stage builds the type's own adapter on what it has of the backbone; no type knows of stages, and a stage may well have
nothing of an adapter. What is wrong with a spec is found out on the whole model, where the names and shapes of the
whole adapter come from too: without memory, on every stage alike. On a stage that several ranks hold together, each
parameter is what `muxtune.parallel.adapters` makes of it.

Rows of a pass come back through a stage only if it, or one before it, has parameters of the pass's tasks: `lowest`.
The norm of a gradient is a sum of squares over stages; whoever exchanges it tells `StageNorm`.

Legend: V virtual rows, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from muxtune.models.backbone import Backbone
from muxtune.parallel.adapters import GradientSum, ShardedAdapter, as_it_is, sharded_adapter
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.stage import ShardedStage, StagedBackbone, StageView
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.registry import build_adapter
from muxtune.peft.targets import matches
from muxtune.spec.peft import IA3, LnTuning, PeftBase, PrefixTuning, PromptTuning

_Layout = Mapping[str, tuple[torch.Size, torch.dtype]]
_META = torch.device("meta")
_OF_ALL = (PrefixTuning, PromptTuning)  # made for the whole model or not at all


class StageNorm:
    """The norm of a whole gradient, for the optimizer of one stage: `square` of its own part, then what all came to."""

    def __init__(self, own: Callable[[], float]) -> None:
        self._own = own
        self._told: float | None = None

    def square(self) -> float:
        """Of the stage's part; its gradient is ready for a step afterwards. Asked once a step."""
        norm = self._own()
        return norm * norm

    def tell(self, norm: float) -> None:
        """What the squares of all stages come to."""
        self._told = norm

    def __call__(self) -> float:
        assert self._told is not None, "a step before the stages have told each other their norms"
        told, self._told = self._told, None
        return told


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A stage's part of an adapter.

    Attributes:
        lowest: the first stage that has anything of it.
        layout: names, shapes and dtypes of the whole's state, in its order.
        trained: those of them that are parameters.
        axis: all ranks.
    """

    adapter: Adapter
    lowest: int
    layout: _Layout
    trained: frozenset[str]
    norm: StageNorm
    axis: TensorAxis
    pipe: TensorAxis
    split: ShardedAdapter | None = None  # of a stage that several ranks hold

    def whole_state(self) -> dict[str, Tensor]:
        """The state of the whole adapter, on all ranks, which ask together. One exchange over stages."""
        own = self.split.whole_state() if self.split is not None else self.adapter.state()
        return self._gathered(own, self.layout)

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of one tensor a parameter of this stage, those of the whole adapter; all ranks ask together."""
        own = self.split.whole(values) if self.split is not None else dict(values)
        return self._gathered(own, self._parameters)

    def whole_gradient(self) -> dict[str, Tensor]:
        """The same of the gradients."""
        if self.split is not None:
            own = self.split.whole_gradient()
        else:
            own = {name: view.grad for name, view in self.adapter.parameters.views.items() if view.grad is not None}
        return self._gathered(own, self._parameters)

    def own(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rank's part of one tensor for each parameter of the whole adapter."""
        if self.split is not None:
            return self.split.own(values)
        return {name: values[name] for name in self.adapter.parameters.views}

    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of the state of a whole adapter."""
        if self.split is not None:
            self.split.load_whole(state)
            return
        self.adapter.load(self.own(state) | {name: state[name] for name in self.adapter.fixed})

    def _gathered(self, own: Mapping[str, Tensor], layout: _Layout) -> dict[str, Tensor]:
        """The tensors of all stages, each of which has its own, on all of them: one exchange for each dtype."""
        found: dict[str, Tensor] = {}
        device = self.adapter.parameters.values.device
        for dtype in dict.fromkeys(dtype for _, dtype in layout.values()):
            shapes = {name: shape for name, (shape, of) in layout.items() if of == dtype}
            full = torch.zeros(sum(shape.numel() for shape in shapes.values()), dtype=dtype, device=device)
            parts = dict(zip(shapes, full.split([shape.numel() for shape in shapes.values()]), strict=True))
            for name in shapes.keys() & own.keys():
                parts[name].copy_(own[name].reshape(-1))
            self.pipe.sum_(full)
            found |= {name: part.view(shapes[name]) for name, part in parts.items()}
        return {name: found[name] for name in layout}

    @property
    def _parameters(self) -> _Layout:
        return {name: told for name, told in self.layout.items() if name in self.trained}


def staged_adapter(
    spec: PeftBase,
    backbone: StagedBackbone | ShardedStage,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> StagedAdapter:
    """This rank's part of a fresh adapter, with the start values of `build_adapter` on one device.

    Raises AdapterError as that does, on all ranks alike, and where a stage that several ranks hold has no rule for it.
    """
    stage, mesh = backbone.stage, backbone.mesh
    whole = build_adapter(spec, backbone.whole, seed=seed, dtype=dtype, device=_META)
    owners = {name: _owner(name, backbone) for name in whole.layout}
    fresh = _Fresh(seed, dtype, device)
    split = None
    if isinstance(backbone, ShardedStage):
        split = _together(spec, backbone, fresh)
        adapter = split.adapter
    else:
        adapter = _alone(spec, backbone, fresh)
    own = {name for name, owner in owners.items() if owner == stage.axis.stage}
    split = _keep(adapter, split, own)
    if adapter.virtual_VE is not None and not adapter.parameters.views:
        adapter.virtual_VE = torch.zeros((), dtype=dtype, device=device).expand(adapter.virtual_VE.shape)
    norm = StageNorm(GradientSum(split) if split is not None else partial(_norm, adapter.parameters))
    trained = frozenset(whole.parameters.views)
    return StagedAdapter(adapter, min(owners.values()), whole.layout, trained, norm, mesh.world, mesh.pipe.pipe, split)


@dataclass(frozen=True, slots=True)
class _Fresh:
    """How adapters are made."""

    seed: int
    dtype: torch.dtype
    device: torch.device

    def of(self, spec: PeftBase, view: BackboneView) -> Adapter:
        """See `build_adapter`."""
        return build_adapter(spec, view, seed=self.seed, dtype=self.dtype, device=self.device)

    def sharded(
        self, spec: PeftBase, backbone: ShardedStage, view: Callable[[Backbone], BackboneView] = as_it_is
    ) -> ShardedAdapter:
        """See `sharded_adapter`."""
        return sharded_adapter(spec, backbone, seed=self.seed, dtype=self.dtype, device=self.device, view=view)

    def nothing(self) -> Adapter:
        """What a stage has that has nothing of an adapter."""
        return Adapter({}, FlatParameters({}, torch.promote_types(self.dtype, torch.float32), self.device))


def _alone(spec: PeftBase, backbone: StagedBackbone, fresh: _Fresh) -> Adapter:
    view = StageView(backbone, backbone.stage)
    if isinstance(spec, _OF_ALL):
        return fresh.of(spec, backbone)
    narrow = _narrowed(spec, view)
    return fresh.of(narrow, view) if narrow is not None else fresh.nothing()


def _together(spec: PeftBase, backbone: ShardedStage, fresh: _Fresh) -> ShardedAdapter:
    stage = backbone.stage
    if isinstance(spec, _OF_ALL):
        return fresh.sharded(spec, backbone)
    narrow = _narrowed(spec, StageView(backbone.whole, stage))
    if narrow is None:
        return ShardedAdapter(fresh.nothing(), {}, {}, {}, backbone.axis)
    return fresh.sharded(narrow, backbone, lambda of: StageView(of, stage))


def _narrowed(spec: PeftBase, view: StageView) -> PeftBase | None:
    """The spec with those of its targets that the stage has; None where that leaves nothing of a type that must have
    something."""
    names = [*view.ops, *view.ends]
    told = {}
    for key in ("target_modules", "feedforward_modules"):
        targets = getattr(spec, key, None)
        if targets is not None and not isinstance(targets, str):
            told[key] = tuple(target for target in targets if any(matches(target, name) for name in names))
    if isinstance(spec, IA3 | LnTuning) and told.get("target_modules") == ():
        return None
    return spec.model_copy(update=told)


def _owner(name: str, backbone: StagedBackbone | ShardedStage) -> int:
    """The stage that a parameter of the whole adapter belongs to: that of the operator that it is named after."""
    whole, last = backbone.whole, len(backbone.stages) - 1
    point = name
    while point and point not in whole.ops and point not in whole.ends:
        point = point.rpartition(".")[0]
    if point in whole.ends:
        return 0 if point == whole.embedding.name else last
    layer = whole.ops[point].layer if point else _prefix_layer(name)
    if layer is None:
        return last if point else 0
    return next(stage for stage, layers in enumerate(backbone.stages) if layer in layers)


def _prefix_layer(name: str) -> int | None:
    """Of a prefix, whose parameters are called layers.N.PART; None of a prompt."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None


def _keep(adapter: Adapter, split: ShardedAdapter | None, names: set[str]) -> ShardedAdapter | None:
    """Drop what other stages have: of a type that was made for all of them."""
    held = adapter.parameters.views.keys()
    if held <= names:
        return split
    adapter.parameters.keep(names)
    if split is None:
        return None
    placements = {name: split.placements[name] for name in held}
    return replace(split, placements=placements, shapes={name: split.shapes[name] for name in held})


def _norm(parameters: FlatParameters) -> float:
    return float(torch.linalg.vector_norm(parameters.gradient)) if parameters.views else 0.0
