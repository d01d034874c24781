"""Operator tables and loads made up for tests: devices whose knee is known."""

from __future__ import annotations

import hypothesis.strategies as st

from muxtune.plan.loads import ChunkLoad, Span, TaskLoad
from muxtune.plan.profile import AdapterCost, Curve, Directions, OperatorTable


def table(knee: int = 256, *, layers: int = 4, full_s: float = 1e-3, entry_s: float = 0.0) -> OperatorTable:
    """A device that takes `full_s` for up to `knee` rows of a layer, and in proportion above."""
    base = Curve((16.0, float(max(knee, 17)), 2.0 * max(knee, 17)), (full_s, full_s, 2 * full_s))
    nothing = Curve((1.0, 2.0), (0.0, 0.0))
    by_row = Curve((1.0, 2.0), (1e-7, 2e-7))
    return OperatorTable(
        model="made-up",
        device="cpu",
        dtype="float32",
        threads=1,
        layers=layers,
        row_bytes=256,
        entry=Curve((1.0, 2.0), (entry_s, entry_s)),
        layer={1: Directions(base, base)},
        attention=Directions(by_row, by_row),
        head=Directions(by_row, by_row),
        adapters={"lora": (AdapterCost(1000, Directions(nothing, nothing)),)},
        optimizer=by_row,
    )


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
