"""Layers as explicit subgraphs, cut at their collectives: each runs, and comes back, when somebody resumes it.

Forward, a sublayer is norm and core (what lies between f and g); its all-reduce is started and yielded, and what hooks
the sum and the residual addition begin the next piece:

    x' = x + behind(sum over ranks of core(norm(x)))

Backward, each part is pulled on its own, on detached inputs, so that there is one all-reduce a sublayer and direction
here too, and nothing but the norm and an addition waits for it:

    g_y = behind^T g'      g_n = sum over ranks of core^T g_y      g = g' + norm^T g_n

f stands behind the norm, as in the pass through autograd: a trained norm then sees the whole gradient on every rank,
and the numbers are those of that pass to the last bit (its gradients have two summands wherever they meet). Standing
before it would make each rank run the norm's backward on its own summand - the same work -, and would make a trained
norm's gradient a part of a sum. Below the lowest adapter nothing comes back, and no exchange is made for it.

Layers of another shape (`muxtune.parallel.sublayers`), and a backbone that is not split, run as one piece through
autograd, with whatever exchanges f and g make on their way: correct, but it overlaps with nothing.

With `recompute` a sublayer keeps its input rows, and its sum where something hooks that; norm and core run again on the
way back. No exchange is made twice.

The boundary: rows in, rows out. Embedding, final norm, head and loss are not layers; who calls them knows how.

Legend: T packed tokens, D model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from muxtune.models.attach import Pass, PassSlot
from muxtune.models.backbone import Backbone, Prelude
from muxtune.parallel.chain import LayerChain, WholeLayers
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.steps import Steps
from muxtune.parallel.sublayers import Call, CutLayer, Sublayer, cut_layers
from muxtune.parallel.tensor import CutPass, ShardedBackbone


class Subgraphs:
    """How a backbone's layers run piece by piece. One for all passes: it keeps nothing of them."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.layers: list[CutLayer] = cut_layers(backbone) if isinstance(backbone, ShardedBackbone) else []

    @property
    def cut(self) -> bool:
        """Whether layers are cut; else a pass is one piece."""
        return bool(self.layers)

    def chain(self, prelude: Prelude, current: Pass, *, layers: range, recompute: bool = False) -> LayerChain:
        """Those `layers` of a pass. Its `current` may be a plain one: hooks are the same."""
        backbone = self.backbone
        if not self.cut:
            return WholeLayers(backbone, prelude, current, layers, recompute=recompute)
        assert isinstance(backbone, ShardedBackbone)
        pieces = [
            _Piece(sublayer, call)
            for index in layers
            for call in [self.layers[index].call(prelude)]
            for sublayer in self.layers[index].sublayers
        ]
        cut = CutPass(current.attention, current.hooks, current.given)
        return CutLayers(pieces, cut, backbone.slot, backbone.axis, recompute)


@dataclass(slots=True)
class _Graphs:
    """What a sublayer's way back needs: leaves, and what was made of them. Of one that recomputes, `x` and `z` alone.

    x -> n; `inner` (a leaf, n's value) -> y, the rank's summand; `z` (a leaf, the sum) and `read` (a leaf, n's value
    again) -> out.
    """

    x: Tensor
    trains: bool = False
    n: Tensor | None = None
    inner: Tensor | None = None
    y: Tensor | None = None
    z: Tensor | None = None
    read: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    sublayer: Sublayer
    call: Call


class CutLayers:
    """Layers as sublayers."""

    def __init__(
        self, pieces: Sequence[_Piece], current: CutPass, slot: PassSlot, axis: TensorAxis, recompute: bool
    ) -> None:
        self._pieces, self._current, self._slot, self._axis = pieces, current, slot, axis
        self._recompute = recompute
        self._kept: list[_Graphs] = []

    def forward(self, x_TD: Tensor) -> Steps[Tensor]:
        """See `LayerChain`."""
        assert not self._kept, "a pass goes forward once"
        x = x_TD.detach()[None].requires_grad_(x_TD.requires_grad)
        for piece in self._pieces:
            kept = _Graphs(x)
            y = self._core(piece, kept)
            total = y.detach().clone(memory_format=torch.contiguous_format)
            if self._recompute:
                kept.n = kept.inner = kept.y = None
            yield self._axis.start_sum(total)
            x = self._joined(piece, kept, total)
            self._kept.append(kept)
        return x[0].detach().requires_grad_(x.requires_grad)

    def backward(self, grad_TD: Tensor) -> Steps[Tensor | None]:
        """See `LayerChain`."""
        grad: Tensor | None = grad_TD[None]
        while self._kept:
            piece, kept = self._pieces[len(self._kept) - 1], self._kept.pop()
            if grad is not None:
                grad = yield from self._pulled(piece, kept, grad)
        return grad[0] if grad is not None else None

    def _core(self, piece: _Piece, kept: _Graphs) -> Tensor:
        """The rank's summand, of rows that `kept` has; fills in its graphs."""
        with torch.enable_grad(), self._running():
            leaf = kept.x
            kept.n = piece.sublayer.normed(leaf)
            kept.inner = kept.n.detach().requires_grad_(kept.n.requires_grad)
            kept.y = piece.sublayer.partial(kept.inner, piece.call)
        kept.trains = kept.y.requires_grad
        return kept.y

    def _joined(self, piece: _Piece, kept: _Graphs, total: Tensor) -> Tensor:
        """The residual rows after the sublayer: a leaf for the next."""
        with torch.no_grad():
            if not piece.sublayer.follows(self._current):
                joined = kept.x + total
                return joined.requires_grad_(kept.x.requires_grad or kept.trains)
        kept.z = total.requires_grad_(kept.trains)
        out = self._behind(piece, kept)
        if self._recompute:
            kept.n = kept.inner = kept.read = kept.out = None
        with torch.no_grad():
            joined = kept.x + out.detach()
        return joined.requires_grad_(kept.x.requires_grad or out.requires_grad)

    def _behind(self, piece: _Piece, kept: _Graphs) -> Tensor:
        """What hooks the sum, as a graph of its own."""
        assert kept.z is not None
        with torch.enable_grad(), self._running():
            if kept.n is None:  # forgotten: the norm runs once more
                kept.n = piece.sublayer.normed(kept.x)
            kept.read = kept.n.detach().requires_grad_(kept.n.requires_grad)
            kept.out = piece.sublayer.behind(kept.z, kept.read, self._current)
        return kept.out

    def _pulled(self, piece: _Piece, kept: _Graphs, grad: Tensor) -> Steps[Tensor | None]:
        """The gradient of the rows before a sublayer, from that of those after it."""
        if self._recompute:
            self._again(piece, kept)
        grad_y: Tensor | None = grad
        if kept.z is not None:
            assert kept.out is not None
            if kept.out.requires_grad:
                torch.autograd.backward([kept.out], [grad])
            grad_y = kept.z.grad
        assert kept.n is not None and kept.y is not None and kept.inner is not None
        if kept.trains and grad_y is not None:
            torch.autograd.backward([kept.y], [grad_y])
        read = kept.read.grad if kept.read is not None else None
        n, x, inner = kept.n, kept.x, kept.inner.grad
        del kept
        if n.requires_grad:
            grad_n = read
            if inner is not None:
                total = inner.contiguous()
                yield self._axis.start_sum(total)
                grad_n = total if read is None else total.add_(read)
            assert grad_n is not None
            torch.autograd.backward([n], [grad_n])
        if not x.requires_grad:
            return None
        assert x.grad is not None
        return grad + x.grad

    def _again(self, piece: _Piece, kept: _Graphs) -> None:
        """Norm and core once more, and what hooks the sum, which was kept."""
        self._core(piece, kept)
        if kept.z is not None:
            self._behind(piece, kept)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._slot.current = self._current
        try:
            yield
        finally:
            self._slot.current = None
