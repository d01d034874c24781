"""A few layers of the backbone, run forward and backward as a training pass runs them, and timed.

The rows are packed ones, the layers are the backbone's own blocks under autograd, adapters are hooked as they are in a
pass (`muxtune.peft.multiplex`). Nothing is attached: adapters are made for these layers alone and dropped, and what is
computed goes nowhere. Each run takes the next layers in turn, unless an adapter says which: weights then come from
memory, as they do in a pass through all layers.

Legend: T packed rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from muxtune.engine.interleaved import Parts, Stopwatch
from muxtune.engine.layout import Layout
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext
from muxtune.models.backbone import Backbone, Block
from muxtune.peft.base import Adapter, BaseOp, Dispatch, EndBase
from muxtune.peft.dropout import row_keys
from muxtune.peft.multiplex import hooks
from muxtune.spec.peft import Place

DEPTH = 2  # layers that run in a trial


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The backbone as a PEFT type sees it (`muxtune.peft.base.BackboneView`), cut after its first layers."""

    backbone: Backbone
    depth: int

    @property
    def ops(self) -> dict[str, BaseOp]:
        return {name: op for name, op in self.backbone.ops.items() if op.layer is None or op.layer < self.depth}

    @property
    def ends(self) -> dict[str, EndBase]:
        return dict(self.backbone.ends)

    @property
    def module_names(self) -> list[str]:
        return self.backbone.module_names

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(one for one in self.backbone.places if one.layer is None or one.layer < self.depth)

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        return self.backbone.attention_shape


class ChainTrial:
    """A packed pass of sequences of these lengths over `depth` layers: the first ones with an `adapter`, which has been
    made for them (`FirstLayers`), on all rows; or without `rotating`."""

    def __init__(
        self,
        backbone: Backbone,
        lengths: Sequence[int],
        watch: Stopwatch,
        adapter: Adapter | None = None,
        *,
        rotating: bool = True,
        depth: int = DEPTH,
    ) -> None:
        self._watch = watch
        self._adapter = adapter
        self._joined = backbone.groups
        layout = Layout()
        for length in lengths:
            layout.add(np.arange(length, dtype=np.int32) % backbone.vocabulary, adapter)
        self._stop = layout.rows
        self._laid = layout.finish(backbone.device)
        with torch.no_grad():
            self._prelude = backbone.begin(self._laid.ids_T, self._laid.positions_T, self._pass())
        rows_TD = self._prelude.x_TD
        self._grad_TD = torch.randn(rows_TD.shape, generator=torch.Generator().manual_seed(0)).to(rows_TD)
        self._windows = _windows(backbone.blocks, depth, rotating and adapter is None)
        self._turn = 0

    def __call__(self) -> Parts:
        """Seconds of one layer: forward, backward."""
        blocks = self._windows[self._turn % len(self._windows)]
        self._turn += 1
        with torch.enable_grad():
            current = self._pass()
            y_TD: Tensor = self._prelude.x_TD.detach().requires_grad_()
            began = self._watch.now()
            for block in blocks:
                y_TD = block.forward(y_TD, self._prelude, current)
            between = self._watch.now()
            torch.autograd.backward([y_TD], [self._grad_TD])
            done = self._watch.now()
        return (between - began) / len(blocks), (done - between) / len(blocks)

    def _pass(self) -> Pass:
        context = AttentionContext(self._laid.segments)
        if self._adapter is None:
            return Pass(context)
        keys = None
        if self._adapter.stochastic:
            example_t, position_t = np.zeros(self._stop, np.int64), np.arange(self._stop)
            keys = row_keys(0, 0, example_t, position_t, self._laid.ids_T.device)
        return Pass(
            context, hooks([Dispatch(0, self._stop, self._adapter, keys)], joined=self._joined), self._laid.given
        )


def _windows(blocks: Sequence[Block], depth: int, rotating: bool) -> list[Sequence[Block]]:
    """`depth` neighbours each; all of a shallower backbone."""
    if not rotating or len(blocks) <= depth:
        return [blocks[:depth]]
    return [blocks[start : start + depth] for start in range(0, len(blocks) - depth + 1, depth)]
