"""From a micro-batch (names and indices) to the packed rows a pass of the backbone runs on.

Items lie one after another, each item's sequences one after another, positions restarting at each sequence; the total
is padded to a multiple of 16 rows with a segment that belongs to nobody. A trained token is predicted by the row
before it, so row i is gathered where token i + 1 is a target.

Legend: T packed rows (padding included), N trained positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.models.attention import Segment
from muxtune.plan.types import MicroBatch, WorkItem

ROW_MULTIPLE = 16
Sources = Mapping[str, Sequence[TokenSequence]]


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Where an item lies: rows [start, stop) of the pass, trained positions [first, last) of the gathered ones.

    `example_t` and `position_t` name each row for dropout.
    """

    item: WorkItem
    start: int
    stop: int
    first: int
    last: int
    example_t: npt.NDArray[np.int64]
    position_t: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    ids_T: Tensor
    positions_T: Tensor
    segments: tuple[Segment, ...]
    items: tuple[ItemRows, ...]
    predict_N: Tensor
    target_N: Tensor
    weight_N: Tensor | None  # 1 / denominator of each position's task; None where nothing trains


def pack(batch: MicroBatch, sources: Sources, device: torch.device, dtype: torch.dtype) -> PackedBatch:
    """Resolve and lay out the sequences of `batch`."""
    laid: list[ItemRows] = []
    ids: list[npt.NDArray[np.int32]] = []
    predict: list[npt.NDArray[np.int64]] = []
    segments: list[Segment] = []
    row = gathered = 0
    for item in batch.items:
        sequences = [sources[item.source][ref.index] for ref in item.sequences]
        start, first = row, gathered
        for sequence in sequences:
            ids.append(sequence.ids)
            segments.append(Segment(len(sequence)))
            trained = np.flatnonzero(sequence.mask[1:])
            predict.append(trained + row)
            row, gathered = row + len(sequence), gathered + len(trained)
        example_t = np.repeat([sequence.index for sequence in sequences], [len(sequence) for sequence in sequences])
        position_t = np.concatenate([np.arange(len(sequence)) for sequence in sequences])
        laid.append(ItemRows(item, start, row, first, gathered, example_t, position_t))
    spare = -row % ROW_MULTIPLE
    if spare:
        ids.append(np.zeros(spare, np.int32))
        segments.append(Segment(spare))
    all_ids = np.concatenate(ids).astype(np.int64)
    positions = np.concatenate([np.arange(segment.rows) for segment in segments])
    rows_N = np.concatenate(predict)
    return PackedBatch(
        torch.from_numpy(all_ids).to(device),
        torch.from_numpy(positions).to(device),
        tuple(segments),
        tuple(laid),
        torch.from_numpy(rows_N).to(device),
        torch.from_numpy(all_ids[rows_N + 1]).to(device),
        _weights(laid, device, dtype) if batch.trains else None,
    )


def _weights(laid: Sequence[ItemRows], device: torch.device, dtype: torch.dtype) -> Tensor:
    parts = []
    for rows in laid:
        assert rows.item.loss is not None, "a train item without a loss"
        parts.append(torch.full((rows.last - rows.first,), 1 / rows.item.loss.denominator, dtype=dtype))
    return torch.cat(parts).to(device)
