"""The layers of one pass: forward once, then backward once; here as one piece, which autograd pulls back.

They run on rows that are cut off from what made them, so that the way back begins when it is its turn, with the
gradient that the next stage sends, and ends at the rows that came in. Layers that are cut at their collectives
(`muxtune.parallel.subgraphs`) have the same two pieces, which then wait on their way.

The boundary: rows in, rows out. Embedding, final norm, head and loss are not layers.

Legend: T packed tokens, D model.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from muxtune.models.attach import Pass
from muxtune.models.backbone import Backbone, Prelude
from muxtune.models.recompute import recomputed
from muxtune.parallel.steps import Steps


class LayerChain(Protocol):
    """The layers of one pass through a stage: once forward, then once backward."""

    def forward(self, x_TD: Tensor) -> Steps[Tensor]:
        """[T, D] -> [T, D], detached; it asks for a gradient if `x_TD` does or anything on the way trains."""
        ...

    def backward(self, grad_TD: Tensor) -> Steps[Tensor | None]:
        """The gradient of what came in, from that of what went out; None where nobody asks for it. What it kept is gone
        afterwards."""
        ...


class WholeLayers:
    """`layers` of a backbone as one piece: a pass that `learns` will come back. With `recompute` each layer keeps its
    input rows only."""

    def __init__(
        self,
        backbone: Backbone,
        prelude: Prelude,
        current: Pass,
        layers: range,
        *,
        learns: bool = True,
        recompute: bool = False,
    ) -> None:
        self._runs = [partial(backbone.blocks[index].forward, prelude=prelude, current=current) for index in layers]
        self._learns, self._recompute = learns, recompute
        self._ends: tuple[Tensor, Tensor] | None = None

    def forward(self, x_TD: Tensor) -> Steps[Tensor]:
        """See `LayerChain`."""
        with torch.set_grad_enabled(self._learns):
            y_TD = leaf_TD = x_TD.detach().requires_grad_(x_TD.requires_grad)
            for run in self._runs:
                y_TD = recomputed(run, y_TD) if self._learns and self._recompute else run(y_TD)
        self._ends = (leaf_TD, y_TD) if self._learns else None
        return y_TD.detach().requires_grad_(y_TD.requires_grad)
        yield  # nothing is waited for, but it is a piece as all are

    def backward(self, grad_TD: Tensor) -> Steps[Tensor | None]:
        """See `LayerChain`."""
        assert self._ends is not None, "a pass comes back once"
        (leaf_TD, y_TD), self._ends = self._ends, None
        if y_TD.requires_grad:
            torch.autograd.backward([y_TD], [grad_TD])
        return leaf_TD.grad
        yield
