"""Chunks by properties, and against the plainest way to count what they could be."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxtune.plan.align import Chunk, Piece, align

BUDGETS = st.integers(1, 120)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths, a budget and the size of a group; from one-token sequences to 10,000 tokens."""
    group = draw(st.sampled_from([1, 2]))
    size = st.one_of(st.integers(1, 50), st.integers(1, 50), st.just(1), st.integers(1, 10_000))
    lengths = draw(st.lists(size, max_size=24))
    budget = draw(st.one_of(BUDGETS, st.just(512)))
    lengths = [min(length, 100 * budget) for length in lengths]  # no more than a hundred pieces of each
    return lengths[: len(lengths) // group * group], budget, group


@given(batches())
def test_every_row_trains_in_exactly_one_chunk(batch: tuple[list[int], int, int]) -> None:
    lengths, budget, group = batch
    trained = [
        piece for chunk in align(lengths, budget, group=group) if chunk.kind == "train" for piece in chunk.pieces
    ]
    for place, length in enumerate(lengths):
        own = sorted((piece.start, piece.stop) for piece in trained if piece.place == place)
        assert own[0][0] == 0 and own[-1][1] == length
        assert all(before[1] == after[0] for before, after in pairwise(own))


@given(batches())
def test_no_chunk_is_over_budget_or_empty(batch: tuple[list[int], int, int]) -> None:
    lengths, budget, group = batch
    for chunk in align(lengths, budget, group=group):
        assert all(piece.rows > 0 for piece in chunk.pieces)
        assert chunk.rows <= budget


@given(batches())
def test_only_longer_sequences_are_cut(batch: tuple[list[int], int, int]) -> None:
    lengths, budget, group = batch
    for chunk in align(lengths, budget, group=group):
        for piece in chunk.pieces:
            assert piece.rows == lengths[piece.place] or lengths[piece.place] > budget


@given(batches())
def test_a_piece_goes_forward_after_what_it_sees_and_trains_after_what_owes_it(
    batch: tuple[list[int], int, int],
) -> None:
    """Keys and values of all earlier pieces are there when a piece runs, and their gradients when it trains."""
    lengths, budget, group = batch
    held: Counter[int] = Counter()  # rows of each sequence that have gone forward
    owing = dict(enumerate(lengths))  # rows that have still to train
    for chunk in align(lengths, budget, group=group):
        for place, start, stop in ((piece.place, piece.start, piece.stop) for piece in chunk.pieces):
            if chunk.kind == "train":
                assert owing[place] == stop and held[place] >= start
                owing[place] = start
            else:
                assert held[place] == start
                held[place] = stop
    assert not any(owing.values())


@given(batches())
def test_a_task_holds_one_cut_group_at_a_time(batch: tuple[list[int], int, int]) -> None:
    lengths, budget, group = batch
    held: set[int] = set()
    left = dict(enumerate(lengths))
    for chunk in align(lengths, budget, group=group):
        for piece in chunk.pieces:
            if piece.rows < lengths[piece.place]:
                held.add(piece.place // group)
            if chunk.kind == "train":
                left[piece.place] -= piece.rows
        assert len(held) <= 1
        held = {one for one in held if any(left[place] for place in range(one * group, one * group + group))}


@given(batches())
def test_forward_every_row_runs_once_and_in_order(batch: tuple[list[int], int, int]) -> None:
    lengths, budget, group = batch
    held: Counter[int] = Counter()
    for chunk in align(lengths, budget, group=group, forward=True):
        assert chunk.kind == "train" and chunk.rows <= budget
        for piece in chunk.pieces:
            assert held[piece.place] == piece.start
            held[piece.place] = piece.stop
    assert held == Counter(dict(enumerate(lengths)))


@given(batches())
def test_a_group_is_in_one_chunk_or_has_gone_forward_and_is_alone(batch: tuple[list[int], int, int]) -> None:
    lengths, budget, group = batch
    gone: Counter[int] = Counter()
    for chunk in align(lengths, budget, group=group):
        gone.update({piece.place: piece.rows for piece in chunk.pieces if chunk.kind == "carry"})
        beside = {piece.place for piece in chunk.pieces}
        for first in {piece.place // group * group for piece in chunk.pieces if chunk.kind == "train" and group > 1}:
            members = range(first, first + group)
            if sum(lengths[member] for member in members) <= budget:
                assert beside >= set(members)
            else:
                assert len(chunk.pieces) == 1 and all(gone[member] == lengths[member] for member in members)


@given(batches())
def test_two_chunks_never_fit_into_one(batch: tuple[list[int], int, int]) -> None:
    """But for those of cut groups: so at most one chunk is half empty."""
    lengths, budget, group = batch
    totals = [sum(lengths[first : first + group]) for first in range(0, len(lengths), group)]
    whole = [
        chunk.rows
        for chunk in align(lengths, budget, group=group)
        if all(totals[piece.place // group] <= budget for piece in chunk.pieces)
    ]
    assert sum(2 * rows <= budget for rows in whole) <= 1


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(20, 40))
def test_it_needs_few_more_chunks_than_the_fewest(lengths: list[int], budget: int) -> None:
    """First fit, longest first is at most 11/9 of the optimum and 6/9 of a chunk (Dosa 2007); here by brute force."""

    @cache
    def fewest(left: tuple[int, ...], room: tuple[int, ...]) -> int:
        if not left:
            return len(room)
        head, rest = left[0], left[1:]
        ways = [
            fewest(rest, tuple(sorted((*room[:place], free - head, *room[place + 1 :]))))
            for place, free in enumerate(room)
            if free >= head
        ]
        return min([*ways, fewest(rest, tuple(sorted((*room, budget - head))))])

    optimum = fewest(tuple(sorted(lengths, reverse=True)), ())
    assert optimum <= len(align(lengths, budget)) <= 11 / 9 * optimum + 6 / 9


def test_the_reports_lengths() -> None:
    def whole(*chunks: tuple[int, ...]) -> tuple[Chunk, ...]:
        lengths = [3, 30, 7, 60]
        return tuple(Chunk("train", tuple(Piece(place, 0, lengths[place]) for place in chunk)) for chunk in chunks)

    assert align([3, 30, 7, 60], 100) == whole((0, 1, 2, 3))
    assert align([3, 30, 7, 60], 60) == whole((0, 1, 2), (3,))
    assert align([], 10) == ()


def test_a_long_sequence_goes_forward_and_then_back() -> None:
    chunks = align([5, 25, 3], 10)
    said = [(chunk.kind, [(piece.place, piece.start, piece.stop) for piece in chunk.pieces]) for chunk in chunks]
    assert said == [
        ("carry", [(1, 0, 10)]),
        ("carry", [(1, 10, 20)]),
        ("train", [(0, 0, 5), (1, 20, 25)]),
        ("train", [(1, 10, 20)]),
        ("train", [(1, 0, 10)]),
        ("train", [(2, 0, 3)]),
    ]


@pytest.mark.parametrize(("lengths", "budget", "group"), [([1], 0, 1), ([1, 2, 3], 5, 2)])
def test_nonsense_is_an_error(lengths: list[int], budget: int, group: int) -> None:
    with pytest.raises(AssertionError):
        align(lengths, budget, group=group)
