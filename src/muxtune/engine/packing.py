"""From a micro-batch (names and indices) to the packed rows a pass of the backbone runs on.

Items lie one after another, each item's sequences one after another (`muxtune.engine.layout`). A trained token is
predicted by the row before it, so row i is gathered where token i + 1 is a target - of a cut sequence too, where that
token may begin the next piece. Rows that an adapter puts before a sequence are nobody's target.

Legend: T packed rows (padding included), t rows of an item, N trained positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.cut import CutSequences
from muxtune.engine.layout import LaidRows, Layout
from muxtune.peft.base import Adapter
from muxtune.plan.types import MicroBatch, SequenceRef, WorkItem

Sources = Mapping[str, Sequence[TokenSequence]]


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Where an item lies: rows [start, stop) of the pass, trained positions [first, last) of the gathered ones.

    `counts` are the trained positions of each sequence; `example_t` and `position_t` name each row for dropout.
    """

    item: WorkItem
    start: int
    stop: int
    first: int
    last: int
    counts: tuple[int, ...]
    example_t: npt.NDArray[np.int64]
    position_t: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    rows: LaidRows
    items: tuple[ItemRows, ...]
    predict_N: Tensor
    target_N: Tensor
    weight_N: Tensor | None  # 1 / denominator of each position's task (of a dpo item: 0); None where nothing trains


def gathered(packed: PackedBatch, items: Sequence[ItemRows]) -> tuple[Tensor, PackedBatch]:
    """The trained positions of some of the items, and the batch that has gathered these alone and weighs none."""
    own_N = torch.cat([torch.arange(rows.first, rows.last) for rows in items]).to(packed.predict_N.device)
    moved, first = [], 0
    for rows in items:
        last = first + rows.last - rows.first
        moved.append(replace(rows, first=first, last=last))
        first = last
    return own_N, PackedBatch(packed.rows, tuple(moved), packed.predict_N[own_N], packed.target_N[own_N], None)


def pack(
    batch: MicroBatch,
    sources: Sources,
    adapters: Mapping[str, Adapter],
    cut: CutSequences,
    device: torch.device,
    dtype: torch.dtype,
) -> PackedBatch:
    """Resolve and lay out the sequences of `batch`; `adapters` are those of its tasks."""
    layout = Layout()
    laid: list[ItemRows] = []
    targets = _Targets([], [])
    sizes: list[int] = []
    gathered = 0
    for item in batch.items:
        adapter = adapters[item.task] if item.task is not None else None
        lead = adapter.lead if adapter is not None else 0
        sequences = [sources[item.source][ref.index] for ref in item.sequences]
        start, first = layout.rows, gathered
        positions, counts = [], []
        for sequence, ref in zip(sequences, item.sequences, strict=True):
            before = layout.rows
            slot = cut.slot(item, ref, lead)
            row = layout.add(sequence.ids[ref.start : ref.stop], adapter, cached=ref.start, cache_slot=slot)
            counts.append(targets.add(sequence, ref, row) if item.kind != "carry" else 0)
            gathered += counts[-1]
            size = layout.rows - before
            sizes.append(size)
            # virtual rows are numbered with the tokens that follow them
            offset = ref.start + (adapter.virtual_rows if adapter is not None and ref.start else 0)
            positions.append(np.arange(offset, offset + size))
        example_t = np.repeat([sequence.index for sequence in sequences], [len(own) for own in positions])
        position_t = np.concatenate(positions)
        laid.append(ItemRows(item, start, layout.rows, first, gathered, tuple(counts), example_t, position_t))
    for size in sizes:
        layout.fill(batch.width - size)
    rows = layout.finish(device)
    weight_N = _weights(laid, device, dtype) if batch.trains else None
    predict_N, target_N = targets.finish(device)
    return PackedBatch(rows, tuple(laid), predict_N, target_N, weight_N)


@dataclass(slots=True)
class _Targets:
    """Rows that predict, and the tokens that they are to predict."""

    predict: list[npt.NDArray[np.int64]]
    target: list[npt.NDArray[np.int32]]

    def add(self, sequence: TokenSequence, ref: SequenceRef, row: int) -> int:
        """Those of a sequence or a piece whose first token lies at `row`; how many."""
        trained = np.flatnonzero(sequence.mask[ref.start + 1 : ref.stop + 1])
        self.predict.append(trained + row)
        self.target.append(sequence.ids[ref.start + 1 + trained])
        return len(trained)

    def finish(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[N] each."""
        predict = np.concatenate([*self.predict, np.zeros(0, np.int64)])
        target = np.concatenate([*self.target, np.zeros(0, np.int32)]).astype(np.int64)
        return torch.from_numpy(predict).to(device), torch.from_numpy(target).to(device)


def _weights(laid: Sequence[ItemRows], device: torch.device, dtype: torch.dtype) -> Tensor:
    """What a token weighs; in dpo that depends on the model's answer, which the executor asks for first."""
    parts = []
    for rows in laid:
        assert rows.item.loss is not None, "a train item without a loss"
        weight = 1 / rows.item.loss.denominator if rows.item.loss.kind == "sft" else 0.0
        parts.append(torch.full((rows.last - rows.first,), weight, dtype=dtype))
    return torch.cat(parts).to(device)
