"""A task's own split of an optimizer batch into chunks: integers in, integers out.

A chunk is a token budget. Whole groups of sequences (one sequence; in dpo, the two of a pair) go into it in the task's
own order; a group longer than the budget makes a chunk by itself. The split depends on the task's lengths and budget
alone - co-runners decide when a chunk runs, never what is in it (design contract 1).
"""

from __future__ import annotations

from collections.abc import Sequence


def split_chunks(lengths: Sequence[int], budget: int, group: int = 1) -> tuple[tuple[int, ...], ...]:
    """Places 0..n-1 in order, cut where the next `group` of sequences would pass `budget` tokens."""
    assert len(lengths) % group == 0, "a part of a group"
    chunks: list[tuple[int, ...]] = []
    current: list[int] = []
    used = 0
    for first in range(0, len(lengths), group):
        length = sum(lengths[first : first + group])
        if current and used + length > budget:
            chunks.append(tuple(current))
            current, used = [], 0
        current.extend(range(first, first + group))
        used += length
    return (*chunks, tuple(current)) if current else tuple(chunks)
