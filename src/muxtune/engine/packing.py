"""From a micro-batch (names and indices) to the packed rows a pass of the backbone runs on.

Items lie one after another, each item's sequences one after another (`muxtune.engine.layout`). A trained token is
predicted by the row before it, so row i is gathered where token i + 1 is a target. Rows that an adapter puts before a
sequence are nobody's target.

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
from muxtune.engine.layout import LaidRows, Layout
from muxtune.peft.base import Adapter
from muxtune.plan.types import MicroBatch, WorkItem

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
    batch: MicroBatch, sources: Sources, adapters: Mapping[str, Adapter], device: torch.device, dtype: torch.dtype
) -> PackedBatch:
    """Resolve and lay out the sequences of `batch`; `adapters` are those of its tasks."""
    layout = Layout()
    laid: list[ItemRows] = []
    predict: list[npt.NDArray[np.int64]] = []
    gathered = 0
    for item in batch.items:
        adapter = adapters[item.task] if item.task is not None else None
        sequences = [sources[item.source][ref.index] for ref in item.sequences]
        start, first = layout.rows, gathered
        sizes, counts = [], []
        for sequence in sequences:
            before = layout.rows
            row = layout.add(sequence.ids, adapter)
            trained = np.flatnonzero(sequence.mask[1:])
            predict.append(trained + row)
            counts.append(len(trained))
            gathered += len(trained)
            sizes.append(layout.rows - before)
        example_t = np.repeat([sequence.index for sequence in sequences], sizes)
        position_t = np.concatenate([np.arange(size) for size in sizes])
        laid.append(ItemRows(item, start, layout.rows, first, gathered, tuple(counts), example_t, position_t))
    rows = layout.finish(device)
    predict_N = torch.from_numpy(np.concatenate(predict)).to(device)
    weight_N = _weights(laid, device, dtype) if batch.trains else None
    return PackedBatch(rows, tuple(laid), predict_N, rows.ids_T[predict_N + 1], weight_N)


def _weights(laid: Sequence[ItemRows], device: torch.device, dtype: torch.dtype) -> Tensor:
    """What a token weighs; in dpo that depends on the model's answer, which the executor asks for first."""
    parts = []
    for rows in laid:
        assert rows.item.loss is not None, "a train item without a loss"
        weight = 1 / rows.item.loss.denominator if rows.item.loss.kind == "sft" else 0.0
        parts.append(torch.full((rows.last - rows.first,), weight, dtype=dtype))
    return torch.cat(parts).to(device)
