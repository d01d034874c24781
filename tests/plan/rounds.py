"""Participants of rounds as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from muxtune.plan.align import Piece, align
from muxtune.plan.round import Participant
from muxtune.plan.types import HTask, Plan, SequenceRef


@st.composite
def participants(draw: st.DrawFn, *, forward: bool = False) -> list[Participant]:
    """Up to six tasks, each with its own lengths and budget, sequences cut; one may have nothing to run."""
    made = []
    for number in range(draw(st.integers(0, 6))):
        lengths = draw(st.lists(st.integers(1, 40), max_size=8))
        chunks = align(lengths, draw(st.integers(1, 100)), forward=forward)
        references = tuple(tuple(_reference(piece, lengths) for piece in chunk.pieces) for chunk in chunks)
        carried = frozenset(place for place, chunk in enumerate(chunks) if chunk.kind == "carry")
        source = f"task-{number}/train"
        made.append(Participant(f"task-{number}", source, references, sum(lengths) or 1, carried=carried))
    return made


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Some of those tasks, and some that are not there, in up to three hTasks."""
    names = draw(st.permutations([f"task-{number}" for number in range(8)]))
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    parts = [tuple(names[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    htasks = tuple(HTask(part, 1, 1, 1.0) for part in parts if part)
    return Plan("muxtune", htasks, tuple((place,) for place in range(len(htasks))), 1, 1.0, 0)


def _reference(piece: Piece, lengths: list[int]) -> SequenceRef:
    whole = lengths[piece.place]
    return SequenceRef(piece.place, piece.rows, piece.start, whole if piece.rows < whole else None)
