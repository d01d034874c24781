"""How long a set of sequences is, in exact integers: what the planner and a person need to know without the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """`counts`: (length in tokens, sequences of that length), lengths ascending."""

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> LengthProfile:
        found, times = np.unique(np.fromiter(lengths, dtype=np.int64), return_counts=True)
        return cls(tuple(zip(found.tolist(), times.tolist(), strict=True)))

    @property
    def sequences(self) -> int:
        return sum(times for _, times in self.counts)

    @property
    def tokens(self) -> int:
        return sum(length * times for length, times in self.counts)

    @property
    def longest(self) -> int:
        return self.counts[-1][0] if self.counts else 0

    def percentile(self, percent: int) -> int:
        """The smallest length that at least `percent` of the sequences do not exceed (nearest rank); 0 of none."""
        rank, seen = max(1, -(-self.sequences * percent // 100)), 0
        for length, times in self.counts:
            seen += times
            if seen >= rank:
                return length
        return 0

    def longest_batch(self, batch: int) -> tuple[int, ...]:
        """The `batch` longest sequences, longest first: the most that one optimizer batch can hold."""
        longest: list[int] = []
        for length, times in reversed(self.counts):
            longest += [length] * min(times, batch - len(longest))
        return tuple(longest)

    def histogram(self) -> tuple[tuple[int, int], ...]:
        """(upper bound, sequences up to it and above the one before) by powers of two."""
        bins: dict[int, int] = {}
        for length, times in self.counts:
            bound = 1 << max(0, length - 1).bit_length()
            bins[bound] = bins.get(bound, 0) + times
        return tuple(sorted(bins.items()))
