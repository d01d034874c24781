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


@given(LENGTHS, BUDGETS, st.integers(2, 3))
def test_groups_are_packed_as_one_sequence_would_be(lengths: list[int], budget: int, group: int) -> None:
    """No pair is ever parted: the chunks of groups are those of the groups' sums, spelled out."""
    whole = lengths[: len(lengths) // group * group]
    sums = [sum(whole[first : first + group]) for first in range(0, len(whole), group)]
    spelled = tuple(
        tuple(group * place + part for place in chunk for part in range(group)) for chunk in split_chunks(sums, budget)
    )
    assert split_chunks(whole, budget, group) == spelled


def test_the_reports_lengths() -> None:
    assert split_chunks([3, 30, 7, 60], 100) == ((0, 1, 2, 3),)
    assert split_chunks([3, 30, 7, 60], 40) == ((0, 1, 2), (3,))
    assert split_chunks([3, 30, 7, 60], 1) == ((0,), (1,), (2,), (3,))
    assert split_chunks([], 10) == ()
