"""Lays sequences out as the packed rows of one pass, one after another, each after what its adapter puts before it.

A sequence may be led by learned positions of its task: a prefix of keys and values (no rows of the pass), then virtual
rows (given embeddings). Its own tokens are numbered on from there, as peft numbers them. A sequence that is fed in
pieces, from a cache, has its lead with the first piece; the cache holds it for the others. One that begins as others do
may have rows for its rest alone: what comes before them, virtual rows too, are rows of the others.

The total is padded to a multiple of 16 rows with a segment that belongs to nobody (design contract 1).

Legend: T packed rows (padding included), V virtual rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muxtune.models.attach import GivenRows
from muxtune.models.attention import Segment
from muxtune.models.attention_tree import RowRange
from muxtune.peft.base import Adapter

ROW_MULTIPLE = 16
Ids = npt.NDArray[np.int32] | Sequence[int]


@dataclass(frozen=True, slots=True)
class LaidRows:
    """What the backbone takes; `given` may be empty."""

    ids_T: Tensor
    positions_T: Tensor
    segments: tuple[Segment, ...]
    given: tuple[GivenRows, ...]


class Layout:
    """The rows of a pass while they are being laid out; `rows` is how many there are so far."""

    def __init__(self) -> None:
        self.rows = 0
        self._ids: list[npt.NDArray[np.int64]] = []
        self._positions: list[npt.NDArray[np.int64]] = []
        self._segments: list[Segment] = []
        self._given: list[GivenRows] = []

    def add(
        self,
        ids: Ids,
        adapter: Adapter | None,
        *,
        cached: int = 0,
        cache_slot: int | None = None,
        seen: Sequence[RowRange] = (),
    ) -> int:
        """Lay out the tokens of a sequence that follow its first `cached`; the row of the first of them. What is cached
        lies in `cache_slot`, or is in the rows of this pass that are `seen`, virtual ones first."""
        leads = adapter is not None and cached == 0
        virtual_VE = adapter.virtual_VE if adapter is not None and leads else None
        leads |= adapter is not None and bool(seen)
        spans = (adapter.prefix,) if adapter is not None and leads and adapter.prefix is not None else ()
        virtual = 0 if virtual_VE is None else virtual_VE.shape[0]
        if virtual_VE is not None:
            self._given.append(GivenRows(self.rows, virtual_VE))
        position = cached + (adapter.lead if adapter is not None else 0) - virtual
        self._append(np.concatenate([np.zeros(virtual, np.int64), np.asarray(ids, np.int64)]), position)
        self._segments.append(Segment(virtual + len(ids), cache_slot, spans, tuple(seen)))
        return self.rows - len(ids)

    def fill(self, rows: int) -> None:
        """Rows that belong to nobody, as if they were a sequence."""
        if rows > 0:
            self._append(np.zeros(rows, np.int64), 0)
            self._segments.append(Segment(rows))

    def finish(self, device: torch.device) -> LaidRows:
        """Pad and hand over."""
        self.fill(-self.rows % ROW_MULTIPLE)
        return LaidRows(
            torch.from_numpy(np.concatenate(self._ids)).to(device),
            torch.from_numpy(np.concatenate(self._positions)).to(device),
            tuple(self._segments),
            tuple(self._given),
        )

    def _append(self, ids: npt.NDArray[np.int64], position: int) -> None:
        self._ids.append(ids)
        self._positions.append(np.arange(position, position + len(ids)))
        self.rows += len(ids)
