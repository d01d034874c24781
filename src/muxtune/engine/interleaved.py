"""Timing of many small pieces of work on a machine that is not quiet.

Every trial runs once without being counted - but for long ones, which have warmed up long before they end - and then
again and again in turn, so that a slow moment meets all alike. What counts is the lower median of each: steps of a run
meet the machine as it is, and the fastest runs foretell steps that are 5-10 % too short where others are at work.

The boundary: it knows no operators. Trials time themselves, and may answer several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

Clock = Callable[[], float]  # seconds, monotonic
Parts = tuple[float, ...]
Trial = Callable[[], Parts]
Name = TypeVar("Name", bound=Hashable)

LEAST, MOST = 2, 15  # counted runs of each trial; in a hurry at least one
HURRIED_S = 1.0  # a budget that is less
_DEARER, _AGAIN = 1.08, 3  # a row than in a smaller pass; how often such a trial runs again
_LONG, _TOO_LONG = 0.02, 0.2  # of the budget, for one run: no more than `LEAST`; none at all


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """`clock` read when the device has done all that it was told to, and what may be spent by it in all. `spreads` gets
    that of each trial that ran twice or more (`spread_of`)."""

    clock: Clock
    device: torch.device
    budget_s: float
    spreads: list[float] = field(default_factory=list, compare=False)

    @property
    def spread(self) -> float:
        """Of the trial in the middle; 0 where none ran twice."""
        return float(np.median(self.spreads)) if self.spreads else 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    @property
    def hurried(self) -> bool:
        """Whether there is no time for more than a first look."""
        return self.budget_s < HURRIED_S

    def timed(self, trials: Mapping[Name, Trial], *, share: float, growing: bool = False) -> dict[Name, Parts]:
        """Typical seconds of each trial's parts, from as many turns as this share of the budget allows, `LEAST` at the
        least. Trials that grow end before the first, but for the very first, that takes much of the budget alone."""
        first = self._warm(trials, growing and not self.hurried)
        taken: dict[Name, list[Parts]] = {name: [parts] if long else [] for name, (parts, long) in first.items()}
        least, end = 1 if self.hurried else LEAST, self.clock() + share * self.budget_s
        for turn in range(MOST):
            if turn >= least and self.clock() >= end:
                break
            for name, runs in taken.items():
                if len(runs) < least or not first[name][1]:
                    runs.append(trials[name]())
        self.spreads.extend(spread_of(runs) for runs in taken.values() if len(runs) > 1)
        return {name: typical(runs) for name, runs in taken.items()}

    def _warm(self, trials: Mapping[Name, Trial], growing: bool) -> dict[Name, tuple[Parts, bool]]:
        """Each trial that is to be run, once: its parts, and whether it is so long that this counts."""
        found: dict[Name, tuple[Parts, bool]] = {}
        for name, trial in trials.items():
            began = self.clock()
            parts = trial()
            seconds = self.clock() - began
            if growing and found and seconds > _TOO_LONG * self.budget_s:
                break
            found[name] = parts, seconds > _LONG * self.budget_s and not self.hurried
        return found


def settled(found: Mapping[int, Parts], trials: Mapping[int, Trial]) -> dict[int, Parts]:
    """Seconds by rows, with those timed again that took more for each row than fewer rows did: it was a burst of what
    others do, which is gone, or it stays so. Fused passes would be called dear for it."""
    least_s, kept = float("inf"), dict(found)
    for rows in sorted(found):
        if sum(found[rows]) / rows > _DEARER * least_s:
            again = typical([trials[rows]() for _ in range(_AGAIN)])
            kept[rows] = min(found[rows], again, key=sum)
        least_s = min(least_s, sum(kept[rows]) / rows)
    return kept


def typical(runs: Sequence[Parts]) -> Parts:
    """Of several runs of one trial, part by part."""
    found = np.quantile(np.array(runs, np.float64), 0.5, axis=0, method="lower")
    return tuple(float(one) for one in found)


def spread_of(runs: Sequence[Parts]) -> float:
    """The middle half of several runs of one trial, as a part of their median: 0 where all take the same."""
    low, middle, high = np.quantile(np.array(runs, np.float64).sum(axis=1), (0.25, 0.5, 0.75))
    return float((high - low) / middle) if middle > 0 else 0.0
