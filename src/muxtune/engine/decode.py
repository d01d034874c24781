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

import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.engine.head import hooked_rows
from muxtune.engine.layout import ROW_MULTIPLE, Layout
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext
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
    layout = Layout()
    lasts: dict[int, int] = {}
    dispatches: list[Dispatch] = []
    gathered: list[Dispatch] = []
    for item in batch.items:
        adapter = tasks[item.task].adapter if item.task is not None else None
        start, first = layout.rows, len(lasts)
        for ref in item.sequences:
            state = source.states[ref.index]
            new = state.ids[state.cached : state.cached + ref.length]
            layout.add(new, adapter, cached=state.cached, cache_slot=ref.index)
            lasts[ref.index] = layout.rows - 1
        if adapter is not None:
            dispatches.append(Dispatch(start, layout.rows, adapter, None))
            gathered.append(Dispatch(first, len(lasts), adapter, None))
    rows = layout.finish(backbone.device)
    context = AttentionContext(rows.segments, source.cache)
    current = Pass(context, hooks(dispatches, plain=plain, joined=backbone.groups), rows.given)
    hidden_TD = backbone.hidden(rows.ids_T, rows.positions_T, current)
    last_ND = hidden_TD[list(lasts.values())]
    last_ND = F.pad(last_ND, (0, 0, 0, -len(lasts) % ROW_MULTIPLE))
    head, hooked = backbone.head, hooked_rows(gathered, backbone.head)
    logits_NV = head.logits_plain(last_ND, hooked) if plain else head.logits(last_ND, hooked)
    for slot, logits_V in zip(lasts, logits_NV, strict=False):
        source.states[slot].logits_V = logits_V
    for item in batch.items:
        for ref in item.sequences:
            source.states[ref.index].cached += ref.length
    return len(rows.ids_T)
