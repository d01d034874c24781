"""A task's own split of an optimizer batch into chunks: integers in, integers out.

A chunk is a token budget. Whole sequences go into it in the task's own order; a sequence longer than the budget makes a
chunk by itself. The split depends on the task's lengths and budget alone - co-runners decide when a chunk runs, never
what is in it (design contract 1).
"""

from __future__ import annotations

from collections.abc import Sequence


def split_chunks(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Places 0..n-1 in order, cut where the next sequence would pass `budget` tokens."""
    chunks: list[tuple[int, ...]] = []
    current: list[int] = []
    used = 0
    for place, length in enumerate(lengths):
        if current and used + length > budget:
            chunks.append(tuple(current))
            current, used = [], 0
        current.append(place)
        used += length
    return (*chunks, tuple(current)) if current else tuple(chunks)
