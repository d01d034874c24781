"""Participants of rounds as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from muxtune.plan.align import Piece, align
from muxtune.plan.round import Participant
from muxtune.plan.types import SequenceRef


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


def _reference(piece: Piece, lengths: list[int]) -> SequenceRef:
    whole = lengths[piece.place]
    return SequenceRef(piece.place, piece.rows, piece.start, whole if piece.rows < whole else None)
