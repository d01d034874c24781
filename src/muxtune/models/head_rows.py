"""Which gathered rows an adapter on the head has, and how they are cut into the slices that the head runs on.

An adapter's gradient is a sum over rows, so where its rows are cut decides its last bits. A task's rows are therefore
cut by themselves, from their own first row on, into pieces of at most a slice (design contract 1); pieces of several
tasks lie in one slice as they fit, each filled up to a multiple of 16 rows - then a piece begins at a 64-byte boundary
whatever the size of the vocabulary - and the rows of nobody fill what is left.

Cost: integers alone; up to 15 rows of filling a piece.

Legend: N gathered rows, n rows of a slice, D what the head takes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

SLICE_ROWS = 128  # logits of more leave the caches, and cost new pages each time (docs/log.md)
ROW_MULTIPLE = 16

_Rows = npt.NDArray[np.int64]


class HeadHook(Protocol):
    """What an adapter does at the head, on its own rows. `rows` are those that a call holds, counted among the hook's;
    there may be zero rows of filling after them."""

    def forward(self, rows: slice, hidden_nD: Tensor, raw_nV: Tensor) -> tuple[Tensor, ...]:
        """Add to the logits, before the soft cap, in place; returns what `backward` needs."""
        ...

    def backward(
        self, rows: slice, hidden_nD: Tensor, kept: tuple[Tensor, ...], delta_nV: Tensor, grad_nD: Tensor
    ) -> None:
        """Add to the parameters' gradients, and to `grad_nD` in place. `delta_nV`: of the logits before the cap."""
        ...

    def forward_plain(self, hidden_nD: Tensor, raw_nV: Tensor) -> Tensor:
        """The logits of all its rows, through autograd."""
        ...


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Gathered rows [start, stop) are `hook`'s; not empty."""

    start: int
    stop: int
    hook: HeadHook


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` of a hook, at the rows `at` of a slice, filling included."""

    hook: HeadHook
    rows: slice
    at: slice


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows that the head runs on together; the index of a row of filling is the number of gathered rows."""

    index_n: _Rows
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class _Open:
    """A slice while it is filled."""

    length: int = 0
    parts: list[_Rows] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, index_n: _Rows) -> None:
        self.parts.append(index_n)
        self.length += len(index_n)


def cut(total: int, hooked: Sequence[HeadRows]) -> list[Slice]:
    """Slices that hold each of `total` rows once; `hooked` ascending, none twice."""
    slices: list[_Open] = []
    for share in hooked:
        for first in range(share.start, share.stop, SLICE_ROWS):
            index_n = _filled(np.arange(first, min(first + SLICE_ROWS, share.stop)), total)
            if not slices or slices[-1].length + len(index_n) > SLICE_ROWS:
                slices.append(_Open())
            at = slice(slices[-1].length, slices[-1].length + len(index_n))
            rows = slice(first - share.start, min(first + SLICE_ROWS, share.stop) - share.start)
            slices[-1].pieces.append(Piece(share.hook, rows, at))
            slices[-1].add(index_n)
    _add_free(slices, _free(total, hooked))
    return [Slice(_filled(np.concatenate(part.parts), total), tuple(part.pieces)) for part in slices]


def _add_free(slices: list[_Open], free_N: _Rows) -> None:
    """The rows of nobody: into what is left of the last slice, then into slices of their own."""
    while len(free_N):
        if not slices or slices[-1].length == SLICE_ROWS:
            slices.append(_Open())
        room = SLICE_ROWS - slices[-1].length
        slices[-1].add(free_N[:room])
        free_N = free_N[room:]


def _free(total: int, hooked: Iterable[HeadRows]) -> _Rows:
    taken_N = np.zeros(total, bool)
    for share in hooked:
        assert not taken_N[share.start : share.stop].any(), "rows of two adapters at the head"
        taken_N[share.start : share.stop] = True
    return np.flatnonzero(~taken_N)


def _filled(index_n: _Rows, filling: int) -> _Rows:
    return np.concatenate([index_n, np.full(-len(index_n) % ROW_MULTIPLE, filling)])
