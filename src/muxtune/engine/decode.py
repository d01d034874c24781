"""Decoding as a work item: new tokens of many sequences, of any tasks, in one pass over a key/value cache.

A `DecodeSource` holds the sequences being decoded. Each pass feeds a sequence the tokens it has not seen yet (the whole
prompt at first, then one at a time) and leaves the logits of its last row with the source; choosing a token from them
is the caller's affair (`muxtune.engine.sampling`).

Legend: T packed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.engine.packing import ROW_MULTIPLE
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.kv_cache import KVCache
from muxtune.peft.base import Dispatch
from muxtune.peft.multiplex import hooks
from muxtune.plan.types import MicroBatch, SequenceRef

if TYPE_CHECKING:
    from muxtune.engine.task import Task


@dataclass(slots=True)
class DecodeState:
    """One sequence: the tokens known so far, how many of them the cache holds, and the last row's logits [V]."""

    ids: list[int]
    cached: int = 0
    logits_V: Tensor | None = None


@dataclass(slots=True)
class DecodeSource:
    """Sequences being decoded, by slot; their keys and values."""

    states: dict[int, DecodeState] = field(default_factory=dict)
    cache: KVCache = field(default_factory=KVCache)

    def reference(self, slot: int) -> SequenceRef:
        """The next work of a slot: its tokens that no pass has seen."""
        return SequenceRef(slot, self.waiting(slot))

    def waiting(self, slot: int) -> int:
        """How many tokens of a slot no pass has seen; 0 for a slot that is not there."""
        state = self.states.get(slot)
        return len(state.ids) - state.cached if state is not None else 0

    def finish(self, slot: int) -> None:
        del self.states[slot]
        self.cache.drop(slot)


@torch.no_grad()
def run_decode(
    backbone: Backbone,
    batch: MicroBatch,
    tasks: Mapping[str, Task],
    sources: Mapping[str, object],
    *,
    plain: bool = False,
) -> int:
    """Run one decode micro-batch, all of whose items name one DecodeSource; returns the rows the backbone ran."""
    source = sources[batch.items[0].source]
    assert isinstance(source, DecodeSource) and len({item.source for item in batch.items}) == 1
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    lasts: dict[int, int] = {}
    dispatches: list[Dispatch] = []
    for item in batch.items:
        start = len(ids)
        for ref in item.sequences:
            state = source.states[ref.index]
            ids.extend(state.ids[state.cached : state.cached + ref.length])
            positions.extend(range(state.cached, state.cached + ref.length))
            segments.append(Segment(ref.length, ref.index))
            state.cached += ref.length
            lasts[ref.index] = len(ids) - 1
        if item.task is not None:
            dispatches.append(Dispatch(start, len(ids), tasks[item.task].adapter, None))
    spare = -len(ids) % ROW_MULTIPLE
    if spare:
        segments.append(Segment(spare))
    ids_T = torch.from_numpy(np.array(ids + [0] * spare, np.int64)).to(backbone.device)
    positions_T = torch.from_numpy(np.array(positions + list(range(spare)), np.int64)).to(backbone.device)
    current = Pass(AttentionContext(segments, source.cache), hooks(dispatches, plain=plain))
    hidden_TD = backbone.hidden(ids_T, positions_T, current)
    last_ND = hidden_TD[list(lasts.values())]
    last_ND = F.pad(last_ND, (0, 0, 0, -len(lasts) % ROW_MULTIPLE))
    for slot, logits_V in zip(lasts, backbone.head.logits(last_ND), strict=False):
        source.states[slot].logits_V = logits_V
    return len(ids) + spare
