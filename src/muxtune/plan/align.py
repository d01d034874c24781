"""A task's own split of an optimizer batch into chunks: integers in, integers out.

A chunk is a budget of rows. Sequences that fit are packed whole (first fit, longest first: at most 11/9 of the fewest
chunks there could be, plus one; Johnson 1973); only longer ones are cut, into pieces of a full chunk each and a tail,
which is packed like a whole sequence. To train, a cut sequence takes several passes (`muxtune.models.kv_carry`): its
earlier pieces go forward, then its tail trains, then the earlier pieces train from the last to the first. Two tails
never share a chunk, so that the keys and values of one cut sequence are all that a task holds.

A *group* (in dpo, the two sequences of a pair) stays together, and is not cut: one longer than the budget makes a chunk
by itself.

The split depends on the task's lengths and budget alone - co-runners decide when a chunk runs, never what is in it
(design contract 1). Cost: n log n for the order, and n times the number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StepKind = Literal["carry", "train"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the sequence at `place`; the whole of it where nothing is said of a cut."""

    place: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """The pieces of one pass, which trains them - or, to "carry", only leaves their keys and values behind. Where
    nothing is to train, "train" is whatever is to be done."""

    kind: StepKind
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


@dataclass(slots=True)
class _Unit:
    """What is packed as one: `packed` rows of a chunk, what goes before that chunk, and what after."""

    packed: tuple[Piece, ...]
    before: tuple[Chunk, ...] = ()
    after: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.packed)

    @property
    def cut(self) -> bool:
        return bool(self.before or self.after)


@dataclass(slots=True)
class _Bin:
    rows: int
    cut: bool  # holds part of something that is
    units: list[int]


def align(lengths: Sequence[int], budget: int, *, group: int = 1, forward: bool = False) -> tuple[Chunk, ...]:
    """The chunks of an optimizer batch, in the order in which they run.

    Args:
        lengths: rows of each sequence, all of which count; `group` neighbours form a group.
        budget: rows of a chunk, at least 1; a group of several may be larger.
        forward: whether nothing is to train: every piece then runs once, from the first on.
    """
    assert budget > 0 and len(lengths) % group == 0, (budget, len(lengths), group)
    units = [_unit(range(first, first + group), lengths, budget, forward) for first in range(0, len(lengths), group)]
    chunks: list[Chunk] = []
    for packed in _packed(units, budget):
        for unit in packed:
            chunks += unit.before
        chunks.append(Chunk("train", tuple(piece for unit in packed for piece in unit.packed)))
        for unit in packed:
            chunks += unit.after
    return tuple(chunks)


def _unit(places: Sequence[int], lengths: Sequence[int], budget: int, forward: bool) -> _Unit:
    if len(places) > 1:
        return _Unit(tuple(Piece(place, 0, lengths[place]) for place in places))
    pieces = _cut(places[0], lengths[places[0]], budget)
    others = pieces[:-1]
    if forward:
        return _Unit((pieces[-1],), tuple(Chunk("train", (piece,)) for piece in others))
    before = tuple(Chunk("carry", (piece,)) for piece in others)
    return _Unit((pieces[-1],), before, tuple(Chunk("train", (piece,)) for piece in reversed(others)))


def _cut(place: int, length: int, budget: int) -> list[Piece]:
    """Full pieces and a tail; at least one piece."""
    starts = range(0, length, budget)
    return [Piece(place, start, min(start + budget, length)) for start in starts]


def _packed(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    """First fit, longest first; chunks and what is in them in the batch's order."""
    bins: list[_Bin] = []
    for index in sorted(range(len(units)), key=lambda index: -units[index].rows):
        unit = units[index]
        fitting = (held for held in bins if held.rows + unit.rows <= budget and not (held.cut and unit.cut))
        found = next(fitting, None)
        if found is None:
            found = _Bin(0, False, [])
            bins.append(found)
        found.rows += unit.rows
        found.cut |= unit.cut
        found.units.append(index)
    return [[units[index] for index in sorted(held.units)] for held in sorted(bins, key=lambda held: min(held.units))]
