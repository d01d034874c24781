"""Chunks of sequences that begin alike, by properties."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.align import Chunk, Likeness, Piece, align

Batch = tuple[list[int], int, int, Likeness]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Lengths, a budget, the size of a group, and what neighbours in some order have in common."""
    group = draw(st.sampled_from([1, 2]))
    lengths = draw(st.lists(st.integers(1, 60), max_size=16))
    lengths = lengths[: len(lengths) // group * group]
    firsts = draw(st.permutations(range(0, len(lengths), group)))
    order = tuple(place for first in firsts for place in range(first, first + group))
    common = [0]
    for one, other in pairwise(order):
        common.append(draw(st.integers(0, min(lengths[one], lengths[other]))))
    return lengths, draw(st.integers(1, 150)), group, Likeness(order, tuple(common[: len(order)]))


def _aligned(batch: Batch, *, forward: bool = False) -> tuple[Chunk, ...]:
    lengths, budget, group, likeness = batch
    return align(lengths, budget, group=group, forward=forward, likeness=likeness)


@given(batches(), st.booleans())
def test_every_row_trains_once_and_within_the_budget(batch: Batch, forward: bool) -> None:
    lengths, budget, *_ = batch
    seen: Counter[int] = Counter()
    for chunk in _aligned(batch, forward=forward):
        assert 0 < chunk.rows <= budget and all(piece.rows > 0 for piece in chunk.pieces)
        if chunk.kind == "train":
            seen.update({piece.place: piece.stop - piece.start for piece in chunk.pieces})
    assert seen == Counter(dict(enumerate(lengths)))


@given(batches())
def test_what_is_shared_is_there_and_is_the_same(batch: Batch) -> None:
    """With the piece right before it, a whole one, and no more than the least that lies between the two."""
    lengths, _, _, likeness = batch
    at = {place: turn for turn, place in enumerate(likeness.order)}
    for chunk in _aligned(batch):
        for before, piece in zip((None, *chunk.pieces), chunk.pieces, strict=False):
            if piece.shared:
                assert before is not None and at[before.place] < at[piece.place]
                assert all(one.stop - one.start == lengths[one.place] for one in (before, piece))
                between = likeness.common[at[before.place] + 1 : at[piece.place] + 1]
                assert piece.shared <= min(*between, lengths[piece.place] - 1, lengths[before.place])


@given(batches())
def test_a_group_is_whole_in_a_chunk_wherever_it_fits(batch: Batch) -> None:
    lengths, budget, group, likeness = batch
    at = {place: turn for turn, place in enumerate(likeness.order)}
    for first in range(0, len(lengths), group):
        own = [lengths[first]]
        for place in range(first + 1, first + group):
            own.append(lengths[place] - min(likeness.common[at[place]], lengths[place] - 1))
        chunks = [one for one in _aligned(batch) if any(piece.place == first for piece in one.pieces)]
        if sum(own) <= budget:
            (chunk,) = chunks
            places = [piece.place for piece in chunk.pieces]
            turn = places.index(first)
            assert places[turn : turn + group] == list(range(first, first + group))


@given(batches())
def test_with_nothing_in_common_it_is_as_without_likeness(batch: Batch) -> None:
    lengths, budget, group, likeness = batch
    nothing = Likeness(likeness.order, (0,) * len(lengths))
    assert align(lengths, budget, group=group, likeness=nothing) == align(lengths, budget, group=group)


def test_a_prefix_is_computed_once_a_chunk() -> None:
    lengths, likeness = [230] * 8, Likeness(tuple(range(8)), (0, *[200] * 7))
    whole = Piece(0, 0, 230)
    assert align(lengths, 440, likeness=likeness) == (
        Chunk("train", (whole, *(Piece(place, 0, 230, 200) for place in range(1, 8)))),
    )
    assert [chunk.rows for chunk in align(lengths, 320, likeness=likeness)] == [320, 320]
    assert [chunk.rows for chunk in align(lengths, 259, likeness=likeness)] == [230] * 8


def test_two_prefixes_do_not_mix() -> None:
    """Sequences come in turn, and are packed by what they begin with."""
    likeness = Likeness((0, 2, 4, 1, 3, 5), (0, 50, 50, 0, 50, 50))
    chunks = align([60] * 6, 80, likeness=likeness)
    assert [[piece.place for piece in chunk.pieces] for chunk in chunks] == [[0, 2, 4], [1, 3, 5]]


def test_a_sequence_that_is_cut_is_between_none() -> None:
    likeness = Likeness((0, 1, 2), (0, 20, 15))
    chunks = align([30, 90, 30], 60, likeness=likeness)
    (shared,) = [piece for chunk in chunks for piece in chunk.pieces if piece.shared]
    assert shared == Piece(2, 0, 30, 15)
