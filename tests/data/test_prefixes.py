"""Which sequences begin alike, against comparing each with each."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.prefixes import by_beginning, in_common
from muxtune.data.types import TokenSequence


@st.composite
def batches(draw: st.DrawFn) -> tuple[TokenSequence, ...]:
    """Of few different tokens, large ones too; any masks."""
    tokens = st.sampled_from([3, 255, 256, 70_000])
    made = []
    for place, ids in enumerate(draw(st.lists(st.lists(tokens, min_size=1, max_size=8), max_size=8))):
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        made.append(TokenSequence(place, np.array(ids, np.int32), np.array(mask)))
    return tuple(made)


def _inputs(sequence: TokenSequence) -> list[int]:
    targets = np.flatnonzero(sequence.mask)
    return sequence.ids[: targets[-1] if len(targets) else 1].tolist()


def _alike(one: TokenSequence, other: TokenSequence) -> int:
    pairs = zip(_inputs(one), _inputs(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(batches())
def test_a_model_is_given_what_the_last_target_is_predicted_from(batch: tuple[TokenSequence, ...]) -> None:
    assert [sequence.input_tokens for sequence in batch] == [len(_inputs(sequence)) for sequence in batch]


def test_an_empty_sequence_has_no_input() -> None:
    assert TokenSequence(0, np.zeros(0, np.int32), np.zeros(0, bool)).input_tokens == 0


@given(batches())
def test_any_two_have_in_common_the_least_of_the_neighbours_between_them(batch: tuple[TokenSequence, ...]) -> None:
    order, common = by_beginning(batch)
    assert sorted(order) == list(range(len(batch))) and len(common) == len(batch)
    for turn, place in enumerate(order):
        for before in range(turn):
            expected = _alike(batch[place], batch[order[before]])
            assert in_common(batch[place], batch[order[before]]) == expected == min(common[before + 1 : turn + 1])


@given(batches())
def test_groups_stay_together(batch: tuple[TokenSequence, ...]) -> None:
    pairs = batch[: len(batch) // 2 * 2]
    order, common = by_beginning(pairs, 2)
    assert [(first % 2, second - first) for first, second in zip(order[::2], order[1::2], strict=True)] == [
        (0, 1) for _ in order[::2]
    ]
    assert list(common[1:]) == [_alike(pairs[one], pairs[other]) for one, other in zip(order[1:], order, strict=False)]
