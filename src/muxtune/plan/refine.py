"""What steps that ran say of predictions: a running correction, and whether the plan was made on wrong ones.

The operator table is measured once; the machine's pace is not constant, and some of what a pass costs is in no table.
So each pass's measured time is laid beside what was predicted of it without any correction. The *correction* is the
median of measured / predicted over the last `WINDOW` of them, weighed by what was predicted: seconds are to be right,
not the number of passes, and a burst of other work moves a median little. *Drift* is how far the correction is from the
one that the plan was made with; beyond `TOLERANCE` a plan is made anew, so that what it says of time holds again.

One factor serves all passes, so it changes no comparison between plans: who runs with whom stays as it was. Factors by
bands of rows were left out: the table has a floor and a slope of its own, and what is wrong on a machine that got
slower is wrong alike everywhere (docs/adr/0010-operator-table.md).

The boundary: numbers, no clock. Cost: a sort of the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW = 64  # passes
ENOUGH = 8  # passes, before which nothing is corrected
TOLERANCE = 0.25


class Refinement:
    """Args: `scale`, the correction that the plan in force was made with."""

    def __init__(self, scale: float = 1.0) -> None:
        self.planned = scale
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def learn(self, passes: Iterable[tuple[float, float]]) -> None:
        """(predicted, measured) seconds of passes that ran; predicted at a scale of 1. Those that nothing was predicted
        of say nothing."""
        self._seen.extend((predicted, measured) for predicted, measured in passes if predicted > 0 and measured > 0)

    @property
    def scale(self) -> float:
        """For `CostModel`: the plan's own until enough has been seen."""
        if len(self._seen) < ENOUGH:
            return self.planned
        predicted, measured = np.array(self._seen, np.float64).T
        order = np.argsort(measured / predicted, kind="stable")
        weight = np.cumsum(predicted[order])
        place = int(np.searchsorted(weight, weight[-1] / 2))
        return float((measured / predicted)[order][place])

    @property
    def drift(self) -> float:
        """How much longer passes take than the plan believed: 0.3 is 30 % longer."""
        return self.scale / self.planned - 1

    @property
    def drifted(self) -> bool:
        """Whether the predictions that the plan was made on are off by more than `TOLERANCE`, either way."""
        return not 1 / (1 + TOLERANCE) <= 1 + self.drift <= 1 + TOLERANCE

    def planned_anew(self) -> None:
        """A plan has been made with the correction as it is now."""
        self.planned = self.scale
