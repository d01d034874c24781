"""From a micro-batch (names and indices) to the packed rows a pass of the backbone runs on.

Items lie one after another, each item's sequences one after another (`muxtune.engine.layout`). A trained token is
predicted by the row before it, so row i is gathered where token i + 1 is a target - of a cut sequence too, where that
token may begin the next piece. Rows that an adapter puts before a sequence are nobody's target.

A sequence that shares its first tokens with the one before it has rows for its rest alone. Where several predict the
same token from the same row, that is gathered once, and weighs as much as all of them; where they go different ways
from a row, it is gathered once for each.

Legend: T packed rows (padding included), t rows of an item, N trained positions, n those of an item, m of each of its
sequences, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.cut import CutSequences
from muxtune.engine.layout import LaidRows, Layout
from muxtune.models.attention_tree import RowRange
from muxtune.peft.base import Adapter
from muxtune.plan.types import MicroBatch, SequenceRef, WorkItem

Value = TypeVar("Value", np.float64, np.bool_)
Sources = Mapping[str, Sequence[TokenSequence]]


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Where an item lies: rows [start, stop) of the pass, trained positions [first, last) of the gathered ones.

    `counts` are the trained tokens of each sequence; `place_m` says which of the item's n positions each of them is, in
    order, None where each has its own. `example_t` and `position_t` name each row for dropout.
    """

    item: WorkItem
    start: int
    stop: int
    first: int
    last: int
    counts: tuple[int, ...]
    example_t: npt.NDArray[np.int64]
    position_t: npt.NDArray[np.int64]
    place_m: npt.NDArray[np.int64] | None = None

    @property
    def tokens(self) -> int:
        """Trained ones, of all its sequences."""
        return sum(self.counts)

    def each(self, value_n: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """[m], what each trained token has of the values of the item's positions."""
        return value_n if self.place_m is None else value_n[self.place_m]

    def together(self, weight_m: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[n], what the trained tokens weigh together at each position."""
        if self.place_m is None:
            return weight_m
        return np.bincount(self.place_m, weight_m, self.last - self.first).astype(np.float64)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`predict_N` names rows of the pass, and none twice but where `repeats`. `weight_N`: what the tokens of a position
    weigh, 1 / the task's denominator each (of a dpo item: 0); None where nothing trains."""

    rows: LaidRows
    items: tuple[ItemRows, ...]
    predict_N: Tensor
    target_N: Tensor
    weight_N: Tensor | None
    repeats: bool = False


def gathered(packed: PackedBatch, items: Sequence[ItemRows]) -> tuple[Tensor, PackedBatch]:
    """The trained positions of some of the items, and the batch that has gathered these alone and weighs none."""
    own_N = torch.cat([torch.arange(rows.first, rows.last) for rows in items]).to(packed.predict_N.device)
    moved, first = [], 0
    for rows in items:
        last = first + rows.last - rows.first
        moved.append(replace(rows, first=first, last=last))
        first = last
    predict_N, target_N = packed.predict_N[own_N], packed.target_N[own_N]
    return own_N, PackedBatch(packed.rows, tuple(moved), predict_N, target_N, None, packed.repeats)


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
    targets = _Targets()
    sizes: list[int] = []
    gathered = 0
    for item in batch.items:
        adapter = adapters[item.task] if item.task is not None else None
        lead, virtual = (adapter.lead, adapter.virtual_rows) if adapter is not None else (0, 0)
        sequences = [sources[item.source][ref.index] for ref in item.sequences]
        start, first = layout.rows, gathered
        own, tree, positions = _Targets(), _Tree(), []
        for sequence, ref in zip(sequences, item.sequences, strict=True):
            before = layout.rows
            seen = tree.first(ref.shared + virtual) if ref.shared else ()
            done, slot = ref.start + ref.shared, cut.slot(item, ref, lead)
            layout.add(sequence.ids[done : ref.stop], adapter, cached=done, cache_slot=slot, seen=seen)
            size = layout.rows - before
            sizes.append(size)
            tree.add(seen, before, layout.rows)
            if item.kind != "carry":
                own.add(sequence, ref, tree.rows_of(ref.length))
            # virtual rows are numbered with the tokens that follow them
            positions.append(np.arange(size) + done + (virtual if done else 0))
        example_t = np.repeat([sequence.index for sequence in sequences], [len(own) for own in positions])
        position_t = np.concatenate(positions)
        place_m = targets.join(own, merge=any(ref.shared for ref in item.sequences))
        gathered += targets.counts[-1]
        laid.append(ItemRows(item, start, layout.rows, first, gathered, own.counts, example_t, position_t, place_m))
    for size in sizes:
        layout.fill(batch.width - size)
    rows = layout.finish(device)
    weight_N = _weights(laid, device, dtype) if batch.trains else None
    predict_N, target_N = targets.finish(device)
    return PackedBatch(rows, tuple(laid), predict_N, target_N, weight_N, targets.repeats)


@dataclass(slots=True)
class _Tree:
    """Where the rows of an item's newest sequence lie, those of others that it shares among them."""

    ranges: tuple[RowRange, ...] = ()

    def add(self, seen: Sequence[RowRange], start: int, stop: int) -> None:
        """A sequence that sees these rows and has [start, stop) of its own."""
        self.ranges = (*seen, (start, stop))
        if len(self.ranges) > 1 and self.ranges[-2][1] == start:
            self.ranges = (*self.ranges[:-2], (self.ranges[-2][0], stop))

    def first(self, rows: int) -> tuple[RowRange, ...]:
        """The first so many."""
        found = []
        for start, stop in self.ranges:
            if rows > 0:
                found.append((start, min(stop, start + rows)))
            rows -= stop - start
        return tuple(found)

    def rows_of(self, tokens: int) -> npt.NDArray[np.int64]:
        """The rows of its last so many tokens: virtual rows come before these."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.ranges])[-tokens:]


@dataclass(slots=True)
class _Targets:
    """Rows that predict, and the tokens that they are to predict, part by part."""

    predict: list[npt.NDArray[np.int64]] = field(default_factory=list)
    target: list[npt.NDArray[np.int64]] = field(default_factory=list)
    repeats: bool = False  # whether a row predicts more than once

    @property
    def counts(self) -> tuple[int, ...]:
        """Of each part."""
        return tuple(map(len, self.predict))

    def add(self, sequence: TokenSequence, ref: SequenceRef, rows: npt.NDArray[np.int64]) -> None:
        """Those of a sequence or a piece whose tokens have these rows."""
        at = np.flatnonzero(sequence.mask[ref.start + 1 : ref.stop + 1])
        self.predict.append(rows[at])
        self.target.append(sequence.ids[ref.start + 1 + at].astype(np.int64))

    def join(self, own: _Targets, *, merge: bool) -> npt.NDArray[np.int64] | None:
        """Add those of an item as one part, the same ones once if they are to `merge`; which of these each then is."""
        predict, target = own.arrays()
        place_m = None
        if merge:
            _, first, place_m = np.unique(predict << 32 | target, return_index=True, return_inverse=True)
            predict, target = predict[first], target[first]
            self.repeats |= bool((np.diff(predict) == 0).any())
        self.predict.append(predict)
        self.target.append(target)
        return place_m

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        nothing = np.zeros(0, np.int64)
        return np.concatenate([nothing, *self.predict]), np.concatenate([nothing, *self.target])

    def finish(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[N] each."""
        predict, target = self.arrays()
        return torch.from_numpy(predict).to(device), torch.from_numpy(target).to(device)


def _weights(laid: Sequence[ItemRows], device: torch.device, dtype: torch.dtype) -> Tensor:
    """What a token weighs; in dpo that depends on the model's answer, which the executor asks for first."""
    parts = []
    for rows in laid:
        assert rows.item.loss is not None, "a train item without a loss"
        weight = 1 / rows.item.loss.denominator if rows.item.loss.kind == "sft" else 0.0
        parts.append(torch.from_numpy(rows.together(np.full(rows.tokens, weight))).to(dtype))
    return torch.cat(parts).to(device)
