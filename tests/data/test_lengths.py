"""The length profile against numpy and brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.lengths import LengthProfile

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 80))
def test_the_profile_says_what_the_lengths_say(lengths: list[int], percent: int, batch: int) -> None:
    profile = LengthProfile.of(lengths)
    assert (profile.sequences, profile.tokens, profile.longest) == (len(lengths), sum(lengths), max(lengths))
    assert profile.percentile(percent) == np.percentile(lengths, percent, method="inverted_cdf")
    assert profile.longest_batch(batch) == tuple(sorted(lengths, reverse=True)[:batch])
    below = 0
    for bound, count in profile.histogram():
        assert count == sum(below < length <= bound for length in lengths)
        below = bound
    assert sum(count for _, count in profile.histogram()) == len(lengths)


def test_no_sequences() -> None:
    profile = LengthProfile.of([])
    assert (profile.sequences, profile.tokens, profile.longest, profile.percentile(50)) == (0, 0, 0, 0)
