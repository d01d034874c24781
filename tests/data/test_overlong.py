"""Policies for what does not fit, held against what they promise token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.overlong import Overlong, cut, default_overlong, keep
from muxtune.data.problems import DataFileError
from muxtune.data.tokens import TableBuilder, TokenTable
from muxtune.errors import DataError

POLICIES: tuple[Overlong, ...] = ("truncate", "drop", "fail", "split")


def table(*masks: list[bool]) -> TokenTable:
    """Example i has ids 100 * i + place and stands in line 10 * (i + 1)."""
    builder = TableBuilder()
    for i, mask in enumerate(masks):
        ids = 100 * i + np.arange(len(mask), dtype=np.int32)
        builder.add(ids, np.array(mask, dtype=np.bool_), line=10 * (i + 1))
    return builder.build()


MASKS = st.lists(st.booleans(), max_size=40).map(lambda mask: [False, *mask[1:]] if mask else mask)


@given(mask=MASKS, max_length=st.integers(2, 50))
def test_splitting_trains_every_target_exactly_once(mask: list[bool], max_length: int) -> None:
    ids, flags = table(mask).row(0)
    pieces = cut(ids, flags, max_length, "split")
    trained = [int(i) for piece_ids, piece_mask in pieces for i in piece_ids[piece_mask]]
    assert trained == ids[flags].tolist()
    for piece_ids, piece_mask in pieces:
        assert 2 <= len(piece_ids) <= max_length and len(piece_ids) == len(piece_mask)
        assert piece_mask.any() and not piece_mask[0]
        start = int(piece_ids[0])
        assert piece_ids.tolist() == list(range(start, start + len(piece_ids)))


@given(mask=MASKS, max_length=st.integers(2, 50), policy=st.sampled_from(POLICIES))
def test_what_fits_is_left_as_it_is(mask: list[bool], max_length: int, policy: Overlong) -> None:
    ids, flags = table(mask).row(0)
    if len(mask) <= max_length:
        pieces = cut(ids, flags, max_length, policy)
        assert len(pieces) == any(mask)
        assert all(piece[0].tolist() == ids.tolist() and piece[1].tolist() == mask for piece in pieces)


SHORT = [False, True, True]
LONG = [False, *[True] * 9]
LATE = [*[False] * 9, True]
BARE = [False, False]


def test_truncation_keeps_the_start_and_counts_what_lost_its_target() -> None:
    kept = keep(table(SHORT, LONG, LATE, BARE, []), "f", 4, "truncate")
    assert [[ids.tolist() for ids, _ in pieces] for pieces in kept.examples] == [[[0, 1, 2]], [[100, 101, 102, 103]]]
    assert (kept.truncated, kept.dropped_untrained) == ([20], [30, 40, 50])


def test_dropping_counts_apart_from_nothing_to_train_on() -> None:
    kept = keep(table(SHORT, LONG, LATE, BARE), "f", 4, "drop")
    assert len(kept.examples) == 1
    assert (kept.dropped_overlong, kept.dropped_untrained) == ([20, 30], [40])


def test_splitting_keeps_pieces_of_an_example_together() -> None:
    kept = keep(table(SHORT, LONG, LATE), "f", 4, "split")
    assert [[ids.tolist() for ids, _ in pieces] for pieces in kept.examples] == [
        [[0, 1, 2]],
        [[100, 101, 102, 103], [103, 104, 105, 106], [106, 107, 108, 109]],
        [[206, 207, 208, 209]],
    ]
    assert (kept.split, kept.dropped_untrained) == ([20, 30], [])


def test_failing_names_every_line_and_its_length() -> None:
    with pytest.raises(DataFileError) as caught:
        keep(table(SHORT, LONG, LATE), "f", 4, "fail")
    assert [(problem.line, problem.code) for problem in caught.value.problems] == [(20, "overlong"), (30, "overlong")]
    assert "10 tokens, more than max_length 4" in str(caught.value)


def test_a_file_with_nothing_to_train_on_fails() -> None:
    with pytest.raises(DataError, match=r"f: no example is left to train on: 2 have nothing to train on"):
        keep(table(BARE, LATE), "f", 4, "truncate")
    with pytest.raises(DataError, match="1 have nothing to train on within 4 tokens, 1 are longer than 4 tokens"):
        keep(table(BARE, LATE), "f", 4, "drop")


def test_defaults() -> None:
    assert default_overlong("text") == "split"
    assert {default_overlong(shape) for shape in ("messages", "prompt_completion", "alpaca", "sharegpt")} == {
        "truncate"
    }


def test_tables_are_read_only_and_refuse_a_trained_first_token() -> None:
    ids, mask = table(SHORT).row(0)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True
    with pytest.raises(AssertionError, match="never a target"):
        table([True])
