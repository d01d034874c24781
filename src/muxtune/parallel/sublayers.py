"""The sublayers of a layer whose norms come first, cut out of transformers' own module.

    x -> x + attention(norm(x)) -> x' + mlp(norm'(x'))

A layer has this shape if standing in for its four modules says so: each multiplies by a prime number instead, and only
this composition makes one row of ones into 252. Layers of other shapes (norms after the sum, more norms, a feed-forward
sublayer that is no module of its own) are not cut. What the layer hands its attention - rotary tables and such - is
found out in the same way, once a pass, without computing anything.

The boundary: modules in, functions on rows out; it exchanges nothing and keeps nothing of a pass.

Legend: T packed tokens, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muxtune.models.attach import MlpOp, NormOp, Pass
from muxtune.models.backbone import Prelude
from muxtune.parallel.tensor import RowParallel, ShardedBackbone

_FACTORS = (2, 3, 7, 5)  # of norm, attention, the other norm and mlp
_ROWS = "hidden_states"  # what a module calls its rows, where they do not come first
_COMPOSED = 252  # (1 + 2 * 3) * (1 + 7 * 5)


@dataclass(frozen=True, slots=True)
class Call:
    """What a module is called with besides its rows, which come by name or first."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @classmethod
    def noted(cls, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Call:
        return cls(arguments if _ROWS in named else arguments[1:], named)

    def on(self, module: nn.Module, x_1TD: Tensor) -> Any:
        """What the module's own forward makes of these rows."""
        if _ROWS in self.named:
            return type(module).forward(module, *self.arguments, **{**self.named, _ROWS: x_1TD})
        return type(module).forward(module, x_1TD, *self.arguments, **self.named)


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One of the two. `op` is that of the feed-forward one, where a module may hook all of it."""

    layer: int
    norm: nn.Module
    module: nn.Module
    row: RowParallel
    op: MlpOp | None = None

    def normed(self, x_1TD: Tensor) -> Tensor:
        """The norm of the rows, hooks included."""
        n_1TD: Tensor = self.norm(x_1TD)
        return n_1TD

    def partial(self, n_1TD: Tensor, call: Call) -> Tensor:
        """The rank's own summand of what the sublayer makes of normed rows."""
        if self.op is not None:
            return self.op.forward(n_1TD[0])[None]
        output = call.on(self.module, n_1TD)
        y_1TD: Tensor = output[0] if isinstance(output, tuple) else output
        return y_1TD

    def follows(self, current: Pass) -> bool:
        """Whether anything is to be done with the sum before it joins the residual rows."""
        return self.row.follows(current) or (self.op is not None and self.op.name in current.hooks)

    def behind(self, y_1TD: Tensor, n_1TD: Tensor, current: Pass) -> Tensor:
        """The sublayer's output from the sum, and from the normed rows that it read."""
        y_1TD = self.row.behind(y_1TD, current)
        hook = current.hooks.get(self.op.name) if self.op is not None else None
        if hook is None:
            return y_1TD
        y_TD: Tensor = hook(_Ran(self.op, y_1TD[0]), n_1TD[0])
        return y_TD[None]


class _Ran:
    """A feed-forward operator as a hook sees it whose output is there already."""

    def __init__(self, op: MlpOp | None, y_TD: Tensor) -> None:
        self._op = op
        self._y_TD = y_TD

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def forward(self, x_TD: Tensor) -> Tensor:
        """That output."""
        return self._y_TD


class CutLayer:
    """A layer as two sublayers."""

    def __init__(self, index: int, layer: nn.Module, attention: Sublayer, mlp: Sublayer) -> None:
        self.sublayers = (attention, mlp)
        self._index, self._layer = index, layer

    def call(self, prelude: Prelude) -> Call:
        """What the layer hands its attention in a pass."""
        _, arguments, keywords = prelude.calls[self._index]
        notes: list[Call] = []

        def attend(*given: Any, **named: Any) -> tuple[Tensor, None]:
            notes.append(Call.noted(given, named))
            return _rows_of(given, named), None

        attention, mlp = self.sublayers
        stand_ins: dict[nn.Module, Callable[..., Any]] = {
            attention.norm: _same,
            attention.module: attend,
            mlp.norm: _same,
            mlp.module: _same,
        }
        with _standing_in(stand_ins):
            type(self._layer).forward(self._layer, torch.empty(1, 1, 1), *arguments, **keywords)
        (found,) = notes
        return found


def cut_layers(backbone: ShardedBackbone) -> list[CutLayer]:
    """Every layer of the backbone, cut; empty where one of them has another shape."""
    recipe = backbone.recipe
    prefix = f"{recipe.body}.{recipe.layers}"
    found: list[CutLayer] = []
    for index in range(len(backbone.blocks)):
        cut = _cut(backbone, index, f"{prefix}.{index}")
        if cut is None:
            return []
        found.append(cut)
    return found


def _cut(backbone: ShardedBackbone, index: int, path: str) -> CutLayer | None:
    recipe, layer = backbone.recipe, backbone.model.get_submodule(path)
    norms = [name for name, op in backbone.ops.items() if isinstance(op, NormOp) and op.layer == index]
    if recipe.mlp is None or len(norms) != 2 or len(recipe.o) != 1 or len(recipe.mlp_out) != 1:
        return None
    o, down = f"{path}.{recipe.o[0]}", f"{path}.{recipe.mlp_out[0]}"
    op = backbone.ops[f"{path}.{recipe.mlp}"]
    if not {o, down} <= backbone.row_parallel.keys() or not isinstance(op, MlpOp):
        return None
    attention, mlp = (backbone.model.get_submodule(name) for name in (o.rpartition(".")[0], op.name))
    before, between = (backbone.model.get_submodule(name) for name in norms)
    if not _composes(layer, before, attention, between, mlp):
        return None
    first = Sublayer(index, before, attention, backbone.row_parallel[o])
    return CutLayer(index, layer, first, Sublayer(index, between, mlp, backbone.row_parallel[down], op))


def _composes(layer: nn.Module, *modules: nn.Module) -> bool:
    """Whether the layer is x + attention(norm(x)), and so on, of these."""
    attention = modules[1]
    stand_ins: dict[nn.Module, Callable[..., Any]] = {
        module: _times(factor, pair=module is attention) for module, factor in zip(modules, _FACTORS, strict=True)
    }
    with _standing_in(stand_ins):
        try:
            output = type(layer).forward(layer, torch.ones(1, 1, 1))
        except TypeError:  # it needs more than rows
            return False
    one = output[0] if isinstance(output, tuple) else output
    return isinstance(one, Tensor) and one.numel() == 1 and float(one) == _COMPOSED


def _rows_of(given: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    rows: Tensor = named[_ROWS] if _ROWS in named else given[0]
    return rows


def _same(x: Tensor, *given: Any, **named: Any) -> Tensor:
    return x


def _times(factor: int, *, pair: bool) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        x = factor * _rows_of(given, named)
        return (x, None) if pair else x

    return run


@contextmanager
def _standing_in(stand_ins: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Have these run instead of the modules."""
    kept = {module: module.__dict__.get("forward") for module in stand_ins}
    try:
        for module, forward in stand_ins.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in kept.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
