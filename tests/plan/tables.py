"""Operator tables and loads made up for tests: devices whose knee is known."""

from __future__ import annotations

import hypothesis.strategies as st

from benchmarks.made_up import table
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad

__all__ = ["load", "loads", "table"]


def load(name: str, *chunks: int, **fields: int) -> TaskLoad:
    """A task whose chunks are one sequence each, of so many rows, half of them trained."""
    made = tuple(ChunkLoad((Span(rows, rows),), -(-rows // 2)) for rows in chunks)
    return TaskLoad(name, made, parameters=1000, **fields)


@st.composite
def loads(draw: st.DrawFn, most: int = 7) -> list[TaskLoad]:
    """Tasks of one to three chunks of one to three sequences; some have pieces that go forward first, and perhaps train
    from what that has kept."""
    count = draw(st.integers(1, most))
    return [_draw_load(draw, f"task-{place}") for place in range(count)]


def _draw_load(draw: st.DrawFn, name: str) -> TaskLoad:
    spans = st.lists(st.integers(1, 300), min_size=1, max_size=3)
    chunks = [
        ChunkLoad(tuple(Span(rows, rows) for rows in draw(spans)), draw(st.integers(0, 20)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        pieces = [Span(64, 64 * place) for place in range(1, draw(st.integers(1, 2)) + 1)]
        carried = [ChunkLoad((piece,), 0, trains=False) for piece in pieces]
        back = [ChunkLoad((piece,), 9, resumes=True) for piece in reversed(pieces)] if draw(st.booleans()) else []
        chunks = [*carried, chunks[0], *back, *chunks[1:]]
    state = draw(st.integers(0, 1000))
    return TaskLoad(name, tuple(chunks), parameters=draw(st.integers(1, 5000)), state_bytes=state)
