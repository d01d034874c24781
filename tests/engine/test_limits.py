"""Tokens and positions that the backbone does not have, of one sequence and of many at once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from muxtune.data.types import TokenSequence
from muxtune.engine import limits
from muxtune.engine.limits import require_all_known, require_known
from muxtune.errors import DataError
from tests.engine.build import backbone_of
from tests.tiny import POSITIONS
from tests.tiny_tokenizer import VOCAB

BACKBONE = backbone_of()


def _sequence(index: int, length: int, last: int = 1) -> TokenSequence:
    ids = np.ones(length, np.int32)
    ids[-1:] = last
    return TokenSequence(index, ids, np.arange(length) > 0)


def _one_by_one(sequences: list[TokenSequence], lead: int) -> None:
    for sequence in sequences:
        require_known(sequence.ids, BACKBONE, what=f"example {sequence.index}", where="job", lead=lead)


def _told(refuse: object, sequences: list[TokenSequence], lead: int) -> str | None:
    try:
        refuse(sequences, lead)
    except DataError as error:
        return str(error)
    return None


LENGTHS = st.sampled_from([0, 1, 7, POSITIONS - 3, POSITIONS, POSITIONS + 1])
LAST = st.sampled_from([0, VOCAB - 1, VOCAB, -1])


@given(st.lists(st.tuples(LENGTHS, LAST), max_size=7), st.sampled_from([0, 3]))
def test_many_at_once_are_refused_as_one_by_one(drawn: list[tuple[int, int]], lead: int) -> None:
    sequences = [_sequence(index, length, last) for index, (length, last) in enumerate(drawn)]
    together = _told(lambda them, lead: require_all_known(them, BACKBONE, where="job", lead=lead), sequences, lead)
    assert together == _told(_one_by_one, sequences, lead)


def test_the_first_that_is_wrong_is_named_in_whatever_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_AT_ONCE", 3)
    sequences = [_sequence(index, 5, VOCAB if index >= 7 else 1) for index in range(9)]
    with pytest.raises(DataError, match="example 7 is empty or holds token ids outside"):
        require_all_known(sequences, BACKBONE, where="job")
    require_all_known(sequences[:7], BACKBONE, where="job")
