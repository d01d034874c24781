"""The operator table: what each operator takes on one device, measured once over counts of rows.

    entry        what a pass costs besides its layers and its head, by rows: packing, embedding, last norm, bookkeeping
    layer        one decoder layer without attention, by rows and degree of tensor parallelism
    attention    of one sequence in one layer, by its positions
    seen         of rows that see more than themselves (a piece of a sequence, a learned prefix), by rows x positions
    head         the head and the loss, by trained positions; "backward" is what their gradient adds
    adapters     what one adapter adds to all layers together, by rows, per PEFT type, number of parameters and points
    optimizer    one step, by parameters

Between measured counts a curve is linear, above the last it goes on with its last slope, below the first it is flat:
operators are flat until they fill the device. A count of nothing costs nothing. What is linear in the rows of a
sequence may be in `layer` or in `attention`: a pass has the sum of both, and nothing else is asked for.

The boundary: numbers, no torch; `muxtune.engine.profiler` measures them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 5  # of what is measured, and of how it is written down

BUSY_SPREAD = 0.25  # of repeats, from which on the machine was busy with something else
BUSY_OTHERS = 0.1  # of the processors, in the hands of others, likewise

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

    def scaled(self, factor: float) -> Curve:
        return Curve(self.counts, tuple(factor * one for one in self.seconds))


NOTHING = Curve((1.0,), (0.0,))


@dataclass(frozen=True, slots=True)
class Directions:
    """Forward, and what backward takes on top of it."""

    forward: Curve
    backward: Curve

    def scaled(self, forward: float, backward: float | None = None) -> Directions:
        """Each by its factor; by one where there is but one."""
        return Directions(self.forward.scaled(forward), self.backward.scaled(forward if backward is None else backward))


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """One adapter of so many parameters, in all layers together, by rows.

    Attributes:
        points: attach points that it hooks; what it costs beside its parameters goes with their number.
        step_s: what it makes anew after each optimizer step (DoRA's norms).
    """

    parameters: int
    cost: Directions
    points: int = 0
    step_s: float = 0.0


def by_size(measured: Iterable[AdapterCost]) -> tuple[AdapterCost, ...]:
    """One type's adapters by ascending parameters, none of which takes less than a smaller one: what says otherwise was
    noise, and those that contradict each other get their mean (isotonic regression, by pooling adjacent violators).

    All are measured at the same counts. Where each curve rises before, it rises after.
    """
    known = sorted(measured, key=lambda one: one.parameters)
    if len(known) < 2:
        return tuple(known)
    forward, backward = (
        [Curve(curve.counts, tuple(map(float, own))) for curve, own in zip(curves, _pooled(curves), strict=True)]
        for curves in ([one.cost.forward for one in known], [one.cost.backward for one in known])
    )
    steps = _isotonic(np.array([one.step_s for one in known]))
    return tuple(
        replace(one, cost=Directions(*costs), step_s=float(step))
        for one, step, *costs in zip(known, steps, forward, backward, strict=True)
    )


def _pooled(curves: Sequence[Curve]) -> Floats:
    """Seconds (curve, count)."""
    seconds = np.array([curve.seconds for curve in curves], np.float64)
    return np.stack([_isotonic(column) for column in seconds.T], axis=1)


def _isotonic(values: Floats) -> Floats:
    """The nearest values, by squares, that do not fall."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in pools])


@dataclass(frozen=True, slots=True)
class OperatorTable:
    """Attributes:
    row_bytes: of one row between two layers, which is also what a collective moves a row.
    measured_at_s: Unix time; 0 where nobody said.
    spread: how far repeats were apart when it was measured: the middle half of them, as a part of their median.
    others: the part of the processors that other processes used meanwhile.
    """

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
    seen: Directions | None = None
    measured_at_s: float = 0.0
    spread: float = 0.0
    others: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether the machine did something else while this was measured, so that it is not to be trusted much."""
        return self.spread > BUSY_SPREAD or self.others > BUSY_OTHERS

    def to_json(self) -> str:
        """One document, with its version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


def from_json(text: str | bytes) -> OperatorTable | None:
    """What `to_json` wrote; None for what another version wrote, and for anything else."""
    try:
        found = json.loads(text)
        return _table(found) if found["version"] == VERSION else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _table(found: Mapping[str, Any]) -> OperatorTable:
    seen = found["seen"]
    table = OperatorTable(
        model=str(found["model"]),
        device=str(found["device"]),
        dtype=str(found["dtype"]),
        threads=_count(found["threads"]),
        layers=_count(found["layers"]),
        row_bytes=_count(found["row_bytes"]),
        entry=_curve(found["entry"]),
        layer={int(degree): _directions(own) for degree, own in found["layer"].items()},
        attention=_directions(found["attention"]),
        head=_directions(found["head"]),
        adapters={str(label): tuple(map(_adapter, own)) for label, own in found["adapters"].items()},
        optimizer=_curve(found["optimizer"]),
        seen=_directions(seen) if seen is not None else None,
        measured_at_s=_numbers([found["measured_at_s"]])[0],
        spread=_numbers([found["spread"]])[0],
        others=_numbers([found["others"]])[0],
    )
    if 1 not in table.layer:
        raise ValueError("there is no layer of degree 1")
    return table


def _adapter(found: Mapping[str, Any]) -> AdapterCost:
    parameters, points = _count(found["parameters"]), _count(found["points"])
    return AdapterCost(parameters, _directions(found["cost"]), points, _numbers([found["step_s"]])[0])


def _directions(found: Mapping[str, Any]) -> Directions:
    return Directions(_curve(found["forward"]), _curve(found["backward"]))


def _curve(found: Mapping[str, Any]) -> Curve:
    counts, seconds = _numbers(found["counts"]), _numbers(found["seconds"])
    ascending = all(one < other for one, other in pairwise((0.0, *counts)))
    if not counts or len(counts) != len(seconds) or not ascending:
        raise ValueError("not a curve")
    return Curve(counts, seconds)


def _numbers(found: Any) -> tuple[float, ...]:
    """Finite ones from 0 up."""
    numbers = tuple(float(one) for one in found)
    if not all(math.isfinite(one) and one >= 0 for one in numbers):
        raise ValueError("not a measurement")
    return numbers


def _count(found: Any) -> int:
    if not isinstance(found, int) or found < 0:
        raise ValueError("not a count")
    return found
