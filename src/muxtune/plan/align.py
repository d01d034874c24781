"""A task's own split of an optimizer batch into chunks: integers in, integers out.

A chunk is a budget of rows. Sequences that fit are packed whole (first fit, longest first: at most 11/9 of the fewest
chunks there could be, plus one; Johnson 1973); only longer ones are cut, into pieces of a full chunk each and a tail,
which is packed like a whole sequence. To train, a cut sequence takes several passes (`muxtune.models.kv_carry`): its
earlier pieces go forward, then its tail trains, then the earlier pieces train from the last to the first. Two tails
never share a chunk, so that the keys and values of one cut sequence are all that a task holds.

A *group* (in dpo, the two sequences of a pair) stays together. The loss of one that does not fit into a chunk is not
known before all of it has gone forward, so all its pieces are carried first, the last ones too; it shares no chunk.

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
    """The pieces of one pass, which trains them - or, to "carry", only goes forward. Where nothing is to
    train, "train" is whatever is to be done."""

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

    alone: bool = False  # whether `packed` shares its chunk with nothing

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
        budget: rows of a chunk, at least 1.
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
    cut = [_cut(place, lengths[place], budget) for place in places]
    onwards = [piece for pieces in cut for piece in pieces]
    if sum(lengths[place] for place in places) <= budget:
        return _Unit(tuple(onwards))
    grouped = len(places) > 1
    if forward:
        return _Unit((onwards[-1],), tuple(Chunk("train", (piece,)) for piece in onwards[:-1]), alone=grouped)
    backwards = [piece for pieces in cut for piece in reversed(pieces)]
    before = tuple(Chunk("carry", (piece,)) for piece in (onwards if grouped else onwards[:-1]))
    after = tuple(Chunk("train", (piece,)) for piece in backwards[1:])
    return _Unit((backwards[0],), before, after, alone=grouped)


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
        found = next(fitting, None) if not unit.alone else None
        if found is None:
            found = _Bin(0, False, [])
            bins.append(found)
        found.rows += budget if unit.alone else unit.rows
        found.cut |= unit.cut
        found.units.append(index)
    return [[units[index] for index in sorted(held.units)] for held in sorted(bins, key=lambda held: min(held.units))]
