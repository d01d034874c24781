"""A task's own split of an optimizer batch into chunks: integers in, integers out.

A chunk is a budget of rows. Sequences that fit are packed whole (first fit, longest first: at most 11/9 of the fewest
chunks there could be, plus one; Johnson 1973); only longer ones are cut, into pieces of a full chunk each and a tail,
which is packed like a whole sequence. To train, a cut sequence takes several passes (`muxtune.models.kv_carry`): its
earlier pieces go forward, then its tail trains, then the earlier pieces train from the last to the first. Two tails
never share a chunk, so that the keys and values of one cut sequence are all that a task holds.

A *group* (in dpo, the two sequences of a pair) stays together. The loss of one that does not fit into a chunk is not
known before all of it has gone forward, so all its pieces are carried first, the last ones too; it shares no chunk.

Sequences that begin alike may share those rows (`Likeness`): neighbours in its order that do, and fit whole into a
chunk, are packed as one - as many of them as fit together, or else in several parts. Rows are shared inside a chunk
only, and never those of a cut sequence.

The split depends on the task's sequences and budget alone - co-runners decide when a chunk runs, never what is in it
(design contract 1). Cost: n log n for the order, and n times the number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StepKind = Literal["carry", "train"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the sequence at `place`; the whole of it where nothing is said of a cut. The first `shared`
    of them are those of the piece before it."""

    place: int
    start: int
    stop: int
    shared: int = 0

    @property
    def rows(self) -> int:
        """Its own."""
        return self.stop - self.start - self.shared


@dataclass(frozen=True, slots=True)
class Likeness:
    """An order of all places, whole groups at a time, and how many first rows each has in common with the one before
    it; 0 where these are too few to be shared."""

    order: tuple[int, ...]
    common: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The pieces of one pass, which trains them - or, to "carry", only goes forward. Where nothing is to
    train, "train" is whatever is to be done."""

    kind: StepKind
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return _rows(self.pieces)


@dataclass(slots=True)
class _Unit:
    """What is packed as one: `packed` rows of a chunk, what goes before that chunk, and what after."""

    packed: tuple[Piece, ...]
    before: tuple[Chunk, ...] = ()
    after: tuple[Chunk, ...] = ()
    alone: bool = False  # whether `packed` shares its chunk with nothing

    @property
    def rows(self) -> int:
        return _rows(self.packed)

    @property
    def cut(self) -> bool:
        return bool(self.before or self.after)


@dataclass(slots=True)
class _Bin:
    rows: int
    cut: bool  # holds part of something that is
    units: list[int]


def align(
    lengths: Sequence[int],
    budget: int,
    *,
    group: int = 1,
    forward: bool = False,
    likeness: Likeness | None = None,
) -> tuple[Chunk, ...]:
    """The chunks of an optimizer batch, in the order in which they run.

    Args:
        lengths: rows of each sequence, all of which count; `group` neighbours form a group.
        budget: rows of a chunk, at least 1.
        forward: whether nothing is to train: every piece then runs once, from the first on.
        likeness: which sequences begin alike, where their rows are to be shared.
    """
    assert budget > 0 and len(lengths) % group == 0, (budget, len(lengths), group)
    if likeness is None:
        likeness = Likeness(tuple(range(len(lengths))), (0,) * len(lengths))
    units = _units(lengths, budget, group, forward, likeness)
    chunks: list[Chunk] = []
    for packed in _packed(units, budget):
        for unit in packed:
            chunks += unit.before
        chunks.append(Chunk("train", tuple(piece for unit in packed for piece in unit.packed)))
        for unit in packed:
            chunks += unit.after
    return tuple(chunks)


def _units(lengths: Sequence[int], budget: int, group: int, forward: bool, likeness: Likeness) -> list[_Unit]:
    """In the batch's order, as their first groups have it."""
    units: list[_Unit] = []
    part: list[Piece] = []  # groups that share rows, and fit together so far
    link = 0  # rows that the next group has in common with the last of them
    for first in range(0, len(lengths), group):
        places, common = likeness.order[first : first + group], likeness.common[first : first + group]
        link = min(link, common[0]) if part else 0
        own, joined = (_whole(places, lengths, (shared, *common[1:])) for shared in (0, link))
        if _rows(own) > budget:
            units.append(_cut_unit(places, lengths, budget, forward))
            link = min(link, *common)
            continue
        if link and _rows(part) + _rows(joined) <= budget:
            part += joined
        else:
            units += [_Unit(tuple(part))] if part else []
            part = own
        link = budget  # all of it
    units += [_Unit(tuple(part))] if part else []
    return sorted(units, key=lambda unit: min(piece.place for piece in unit.packed))


def _whole(places: Sequence[int], lengths: Sequence[int], common: Sequence[int]) -> list[Piece]:
    """The sequences of a group, each but for one row at least."""
    return [
        Piece(place, 0, lengths[place], min(shared, lengths[place] - 1))
        for place, shared in zip(places, common, strict=True)
    ]


def _rows(pieces: Sequence[Piece]) -> int:
    return sum(piece.rows for piece in pieces)


def _cut_unit(places: Sequence[int], lengths: Sequence[int], budget: int, forward: bool) -> _Unit:
    """A group that does not fit into a chunk."""
    cut = [_cut(place, lengths[place], budget) for place in places]
    onwards = [piece for pieces in cut for piece in pieces]
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
