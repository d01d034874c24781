"""The operator table: what each operator takes on one device, measured once over counts of rows.

    entry        what a pass costs before its first layer, by rows: packing, embedding
    layer        one decoder layer without attention, by rows and degree of tensor parallelism
    attention    of one sequence in one layer, by its positions
    head         the head and the loss, by trained positions; "backward" is what their gradient adds
    adapters     what one adapter adds to all layers together, by rows, per PEFT type and number of parameters
    optimizer    one step, by parameters

Between measured counts a curve is linear, above the last it goes on with its last slope, below the first it is flat:
operators are flat until they fill the device. A count of nothing costs nothing.

The boundary: numbers, no torch; `muxtune.engine.profiler` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a count; `counts` ascend and are positive."""

    counts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: npt.ArrayLike) -> Floats:
        """Seconds at each count."""
        asked = np.asarray(count, np.float64)
        found = np.interp(asked, self.counts, self.seconds)
        if len(self.counts) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.counts[-1] - self.counts[-2])
            found = found + np.maximum(asked - self.counts[-1], 0) * max(slope, 0.0)
        return np.where(asked > 0, found, 0.0)


@dataclass(frozen=True, slots=True)
class Directions:
    """Forward, and what backward takes on top of it."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """One adapter of so many parameters, in all layers together, by rows."""

    parameters: int
    cost: Directions


@dataclass(frozen=True, slots=True)
class OperatorTable:
    """`row_bytes`: of one row between two layers, which is also what a collective moves a row."""

    model: str
    device: str
    dtype: str
    threads: int
    layers: int
    row_bytes: int
    entry: Curve
    layer: Mapping[int, Directions]  # by degree of tensor parallelism; 1 is always there
    attention: Directions
    head: Directions
    adapters: Mapping[str, tuple[AdapterCost, ...]]  # by label, by ascending parameters
    optimizer: Curve
