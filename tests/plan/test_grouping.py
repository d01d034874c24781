"""Buckets by properties, and against the best partition there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.grouping import group

SECONDS = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=24)


def _fullest(seconds: list[float], buckets: tuple[tuple[int, ...], ...]) -> float:
    return max(sum(seconds[place] for place in bucket) for bucket in buckets)


@given(SECONDS, st.data())
def test_every_place_is_in_one_of_so_many_buckets(seconds: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(seconds)))
    buckets = group(seconds, count)
    assert len(buckets) == count and all(buckets)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(seconds)))
    assert list(buckets) == sorted(tuple(sorted(bucket)) for bucket in buckets)
    assert group(seconds, count) == buckets


@given(SECONDS, st.data())
def test_the_order_of_the_htasks_does_not_matter_to_the_times(seconds: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(seconds)))
    shuffled = data.draw(st.permutations(seconds))
    assert _fullest(shuffled, group(shuffled, count)) == pytest.approx(_fullest(seconds, group(seconds, count)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_the_fullest_is_within_grahams_bound_of_the_best(seconds: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(3, len(seconds))))
    best = min(
        max(sum(itertools.compress(seconds, (at == bucket for at in places))) for bucket in range(count))
        for places in itertools.product(range(count), repeat=len(seconds))
    )
    assert _fullest(seconds, group(seconds, count)) <= (4 / 3 - 1 / (3 * count)) * best


@pytest.mark.parametrize(
    ("seconds", "count", "fullest"),
    [
        ([3, 3, 2, 2, 2], 2, 6),  # LPT alone comes to 7
        ([5, 5, 4, 4, 3, 3, 3], 3, 9),  # and here to 11
        ([1, 1, 1, 1], 2, 2),
        ([4, 0, 0], 3, 4),
        ([0, 0, 0], 3, 0),
        ([7, 1], 1, 8),
    ],
)
def test_small_cases(seconds: list[float], count: int, fullest: float) -> None:
    assert _fullest(seconds, group(seconds, count)) == fullest


def test_members_and_buckets_are_in_order() -> None:
    assert group([1, 9, 1, 9], 2) == ((0, 1), (2, 3))
    assert group([2, 2, 2], 3) == ((0,), (1,), (2,))
