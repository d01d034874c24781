"""Participants of rounds as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from muxtune.plan.align import split_chunks
from muxtune.plan.round import Participant
from muxtune.plan.types import SequenceRef


@st.composite
def participants(draw: st.DrawFn) -> list[Participant]:
    """Up to six tasks, each with its own lengths and budget; one may have nothing to run."""
    made = []
    for number in range(draw(st.integers(0, 6))):
        lengths = draw(st.lists(st.integers(1, 40), max_size=8))
        chunks = split_chunks(lengths, draw(st.integers(1, 100)))
        references = tuple(tuple(SequenceRef(place, lengths[place]) for place in chunk) for chunk in chunks)
        made.append(Participant(f"task-{number}", f"task-{number}/train", references, sum(lengths) or 1))
    return made
