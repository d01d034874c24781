"""Chunks by properties, and against the plainest way to say what they are."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.align import split_chunks

LENGTHS = st.lists(st.integers(1, 50), max_size=30)
BUDGETS = st.integers(1, 120)


@given(LENGTHS, BUDGETS)
def test_each_sequence_comes_once_and_in_order(lengths: list[int], budget: int) -> None:
    chunks = split_chunks(lengths, budget)
    assert [place for chunk in chunks for place in chunk] == list(range(len(lengths)))
    assert all(chunks)


@given(LENGTHS, BUDGETS)
def test_no_chunk_passes_the_budget_but_a_single_long_sequence(lengths: list[int], budget: int) -> None:
    for chunk in split_chunks(lengths, budget):
        assert len(chunk) == 1 or sum(lengths[place] for place in chunk) <= budget


@given(LENGTHS, BUDGETS)
def test_no_chunk_could_have_taken_the_next_sequence_too(lengths: list[int], budget: int) -> None:
    chunks = split_chunks(lengths, budget)
    for chunk, after in pairwise(chunks):
        assert sum(lengths[place] for place in (*chunk, after[0])) > budget


@given(LENGTHS.filter(bool), BUDGETS)
def test_no_split_in_this_order_has_fewer_chunks(lengths: list[int], budget: int) -> None:
    """Against a dynamic programme over all ways to cut."""
    fewest = [0] + [len(lengths)] * len(lengths)
    for stop in range(1, len(lengths) + 1):
        for start in range(stop):
            if stop - start == 1 or sum(lengths[start:stop]) <= budget:
                fewest[stop] = min(fewest[stop], fewest[start] + 1)
    assert len(split_chunks(lengths, budget)) == fewest[-1]


def test_the_reports_lengths() -> None:
    assert split_chunks([3, 30, 7, 60], 100) == ((0, 1, 2, 3),)
    assert split_chunks([3, 30, 7, 60], 40) == ((0, 1, 2), (3,))
    assert split_chunks([3, 30, 7, 60], 1) == ((0,), (1,), (2,), (3,))
    assert split_chunks([], 10) == ()
