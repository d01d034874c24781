"""Task fusion: which tasks share passes, by dynamic programming over the tasks in a fixed order.

Tasks are sorted by chunks, then rows of a step, then name; an hTask is a run of neighbours in that order. The value of
a partition into hTasks H_1..H_K on S pipeline stages is the time of one iteration of all tasks,

    bottleneck x (sum_k T(H_k) + (S - 1) x max_k t(H_k))

T is the time of all passes and optimizer steps of an hTask, and `HTASK_S`, so that of equals the one with fewer hTasks
is better; t is the time of its longest pass, and `bottleneck` the largest stage's share of the layers (1F1B: every
stage waits S - 1 passes for its first and last). An hTask whose largest pass does not fit into memory, or has more than
`most_rows`, does not exist.

    front(j) = the pairs (sum, max) of partitions of the first j tasks that no other pair is below in both
    front(j) = union over i < j of { (a + T(i..j), max(b, t(i..j))) for (a, b) in front(i) }

The best of front(M) is optimal over all partitions into runs of neighbours: the value grows with both parts, so nothing
above another pair can ever win. Pairs that cannot win any more are left out as well: with the least sum that the
remaining tasks could take they come to more than a partition that is known. After the idea of the MuxTune paper
(NSDI'26), dynamic programming over a pipeline's cost; the exact pair is ours.

Cost: M^2 segments, evaluated M at a time in numpy; with one stage a front is one pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muxtune.errors import ConfigError
from muxtune.plan.cost import ROW_MULTIPLE, CostModel
from muxtune.plan.loads import TRAINS, TaskLoad
from muxtune.plan.memory import MemoryModel, size_text
from muxtune.plan.profile import Floats

Counts = npt.NDArray[np.int64]
Cuts = list[tuple[int, int]]  # (start, stop) of each hTask
HTASK_S = 1e-6  # what an hTask counts beside its passes


@dataclass(frozen=True, slots=True)
class Fusion:
    """hTasks in launch order, members in the sorted order; `value_s` as the module's docstring defines it."""

    htasks: tuple[tuple[TaskLoad, ...], ...]
    value_s: float


def in_order(loads: Sequence[TaskLoad]) -> list[TaskLoad]:
    """The order over which fusion is optimal; names are unique, so it is the same for any order of the input."""
    return sorted(loads, key=lambda load: (len(load.chunks), load.tokens, load.name))


def fuse_optimally(
    loads: Sequence[TaskLoad],
    cost: CostModel,
    memory: MemoryModel,
    *,
    stages: int = 1,
    most_rows: int | None = None,
    also_held: Sequence[TaskLoad] = (),
) -> Fusion:
    """The best partition into neighbours. `also_held`: tasks that hold memory but do not run.

    Raises ConfigError for a task that does not fit even alone.
    """
    if not loads:
        return Fusion((), 0.0)
    ordered = in_order(loads)
    runs = _runs(ordered, cost, memory, memory.free_bytes([*ordered, *also_held]), most_rows)
    cuts, value = _partition(runs, stages - 1)
    share = bottleneck(cost.layers, stages)
    return Fusion(tuple(tuple(ordered[start:stop]) for start, stop in cuts), share * value)


def bottleneck(layers: int, stages: int) -> float:
    """The largest stage's share of the layers."""
    return -(-layers // stages) / layers


@dataclass(frozen=True, slots=True)
class _Run:
    """The runs of neighbours that end at one place, from the earliest start that fits on: time and longest pass."""

    first: int
    total: Floats
    longest: Floats


def _runs(
    ordered: Sequence[TaskLoad],
    cost: CostModel,
    memory: MemoryModel,
    free_bytes: int | None,
    most_rows: int | None,
) -> list[_Run]:
    segments = _Segments(ordered, cost)
    firsts = _firsts(ordered, memory, free_bytes, most_rows)
    return [_Run(first, *segments.ending_at(stop, first)) for stop, first in enumerate(firsts, 1)]


class _Segments:
    """Times of runs of neighbours, as the cost model predicts them."""

    def __init__(self, ordered: Sequence[TaskLoad], cost: CostModel) -> None:
        slots = sorted({slot for load in ordered for slot in load.slots})
        place_of = {slot: place for place, slot in enumerate(slots)}
        rows, trained, own = (np.zeros((len(ordered) + 1, len(slots))) for _ in range(3))
        steps = np.zeros(len(ordered) + 1)
        for place, load in enumerate(ordered, 1):
            for slot, chunk in load.slots.items():
                cell = place, place_of[slot]
                rows[cell], trained[cell], own[cell] = chunk.rows, chunk.trained, cost.own_s(load, chunk)
            steps[place] = cost.step_s(load)
        self._rows, self._trained = (np.cumsum(values, axis=0).astype(np.int64) for values in (rows, trained))
        self._own, self._steps = np.cumsum(own, axis=0), np.cumsum(steps)
        kinds = [(part >= TRAINS, part > TRAINS) for _, part in slots]
        self._kinds = [
            (_Known(cost, self._rows[-1][at].max(), self._trained[-1][at].max(), trains=kind[0], resumes=kind[1]), at)
            for kind in sorted(set(kinds))
            if len(at := np.flatnonzero([one == kind for one in kinds]))
        ]

    def ending_at(self, stop: int, first: int) -> tuple[Floats, Floats]:
        """(time, longest pass) of the runs [start, stop) for start = first..stop - 1."""
        passes: Floats = self._own[stop] - self._own[first:stop]
        rows, trained = (sums[stop] - sums[first:stop] for sums in (self._rows, self._trained))
        for known, slots in self._kinds:
            passes[:, slots] += known.shared_s(rows[:, slots], trained[:, slots])
        total: Floats = passes.sum(axis=1) + (self._steps[stop] - self._steps[first:stop]) + HTASK_S
        longest: Floats = passes.max(axis=1)
        return total, longest


class _Known:
    """`CostModel.shared_s` at every count up to the most there are, looked up: its two parts add up."""

    def __init__(self, cost: CostModel, most_rows: int, most_trained: int, *, trains: bool, resumes: bool) -> None:
        rows = ROW_MULTIPLE * np.arange(-(-most_rows // ROW_MULTIPLE) + 1, dtype=np.float64)
        trained = np.arange(most_trained + 1, dtype=np.float64)
        self._by_rows = cost.shared_s(rows, np.zeros_like(rows), trains=trains, resumes=resumes)
        self._by_trained = cost.shared_s(np.zeros_like(trained), trained, trains=trains, resumes=resumes)

    def shared_s(self, rows: Counts, trained: Counts) -> Floats:
        found: Floats = self._by_rows[-(-rows // ROW_MULTIPLE)] + self._by_trained[trained]
        return found


def _firsts(
    ordered: Sequence[TaskLoad], memory: MemoryModel, free_bytes: int | None, most_rows: int | None
) -> list[int]:
    """For each stop, the least start of a run [start, stop) that fits. Raises ConfigError where none does.

    A run that does not fit does not with one more task either, so starts never fall.
    """
    rows = np.cumsum([0, *(load.peak_rows for load in ordered)])
    longest = np.array([load.longest for load in ordered], np.int64)
    firsts, first = [], 0
    for stop in range(1, len(ordered) + 1):
        seen = np.maximum.accumulate(longest[first:stop][::-1])[::-1]
        able = fits(memory, rows[stop] - rows[first:stop], seen, free_bytes, most_rows)
        if not able[-1]:
            raise _too_large(ordered[stop - 1], memory, free_bytes, most_rows)
        first += int(able.argmax())
        firsts.append(first)
    return firsts


def fits(
    memory: MemoryModel, rows: Counts, longest: Counts, free_bytes: int | None, most_rows: int | None
) -> npt.NDArray[np.bool_]:
    """Whether passes of so many rows do, whose longest sequences see so many positions."""
    able = np.full(rows.shape, True)
    if most_rows is not None:
        able &= rows <= most_rows
    if free_bytes is not None:
        able &= memory.pass_bytes(rows, longest) <= free_bytes
    return able


def _too_large(load: TaskLoad, memory: MemoryModel, free_bytes: int | None, most_rows: int | None) -> ConfigError:
    needed, rows = memory.pass_bytes(load.peak_rows, load.longest), load.peak_rows
    if free_bytes is not None and needed > free_bytes:
        told = (
            f"needs {size_text(needed)} for a pass of {rows} rows, and {size_text(max(free_bytes, 0))} are left beside "
            "the process, the weights and the adapters"
        )
    else:
        told = f"has a chunk of {rows} rows; a pass may have {most_rows}"
    return ConfigError(told, where=load.name, hint="more memory, or a smaller max_length of the job")


def _partition(runs: Sequence[_Run], weight: int) -> tuple[Cuts, float]:
    """The best cuts, and sum + weight x longest pass of them."""
    cuts, sums = _least_sum(runs)
    if not weight:
        return cuts, float(sums[-1])
    rest = _least_rest(runs)
    known = min(_value(one, runs, weight) for one in [cuts, *_bounded(runs, cuts)])
    fronts = [_Front.start()]
    for stop, run in enumerate(runs, 1):
        least = sums[run.first : stop] + run.total + weight * run.longest + rest[stop]
        able = np.flatnonzero(least <= known * (1 + _ROUNDING))
        fronts.append(_Front.after(fronts, run, able, known * (1 + _ROUNDING) - rest[stop], weight))
    return _traced(fronts, weight)


_ROUNDING = 1e-9  # of sums in another order
_BOUNDS = 24  # longest passes that are tried for a partition to know


def _least_sum(runs: Sequence[_Run], bound: float = np.inf) -> tuple[Cuts, Floats]:
    """The cuts of the least sum with no pass above `bound`, and the least sums of the first 0, 1, ... tasks."""
    sums, starts = np.zeros(len(runs) + 1), [0]
    for stop, run in enumerate(runs, 1):
        values = sums[run.first : stop] + np.where(run.longest <= bound, run.total, np.inf)
        starts.append(run.first + int(values.argmin()))
        sums[stop] = values[starts[-1] - run.first]
    cuts, stop = [], len(runs)
    while stop:
        cuts.append((starts[stop], stop))
        stop = starts[stop]
    return cuts[::-1], sums


def _least_rest(runs: Sequence[_Run]) -> Floats:
    """The least sums of the tasks from place 0, 1, ... on."""
    rest = np.full(len(runs) + 1, np.inf)
    rest[-1] = 0
    for stop in range(len(runs), 0, -1):
        run = runs[stop - 1]
        rest[run.first : stop] = np.minimum(rest[run.first : stop], run.total + rest[stop])
    return rest


def _bounded(runs: Sequence[_Run], cuts: Cuts) -> list[Cuts]:
    """Partitions of the least sum for some bounds on the longest pass, below that of `cuts`."""
    least = max(float(run.longest[-1]) for run in runs)  # of each task alone
    most = max(float(runs[stop - 1].longest[start - runs[stop - 1].first]) for start, stop in cuts)
    return [_least_sum(runs, bound)[0] for bound in np.linspace(least, most, _BOUNDS, endpoint=False)]


def _value(cuts: Cuts, runs: Sequence[_Run], weight: int) -> float:
    parts = [(runs[stop - 1], start - runs[stop - 1].first) for start, stop in cuts]
    return sum(float(run.total[at]) for run, at in parts) + weight * max(float(run.longest[at]) for run, at in parts)


@dataclass(frozen=True, slots=True)
class _Front:
    """Partitions of the first tasks, none below another: `sums` and `maxima` of each, where the last hTask begins, and
    which of that place's front it goes on from."""

    sums: Floats
    maxima: Floats
    starts: Counts
    parents: Counts

    @classmethod
    def start(cls) -> _Front:
        return cls(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))

    @classmethod
    def after(cls, fronts: Sequence[_Front], run: _Run, able: Counts, known: float, weight: int) -> _Front:
        """Of all tasks up to the end of `run`, where the last hTask begins at first + one of `able`; those only that
        come to no more than `known`."""
        if not len(able):  # no partition with an end here can win
            return cls(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
        before = [fronts[run.first + at] for at in able]
        sizes = np.array([len(front.sums) for front in before])
        sums = np.concatenate([front.sums for front in before]) + np.repeat(run.total[able], sizes)
        maxima = np.maximum(np.concatenate([front.maxima for front in before]), np.repeat(run.longest[able], sizes))
        starts = np.repeat(run.first + able, sizes)
        parents = np.concatenate([np.arange(size) for size in sizes])
        kept = np.flatnonzero(sums + weight * maxima <= known)
        kept = kept[_undominated(sums[kept], maxima[kept])]
        return cls(sums[kept], maxima[kept], starts[kept], parents[kept])


def _undominated(sums: Floats, maxima: Floats) -> Counts:
    """Places of the pairs that no other is below; the first of equals."""
    order = np.lexsort((maxima, sums))
    least = np.minimum.accumulate(maxima[order])
    better = np.concatenate([[True], maxima[order][1:] < least[:-1]])
    kept: Counts = order[better[: len(order)]]
    return kept


def _traced(fronts: Sequence[_Front], weight: int) -> tuple[Cuts, float]:
    last = fronts[-1]
    values = last.sums + weight * last.maxima
    at, stop = int(values.argmin()), len(fronts) - 1
    value = float(values[at])
    cuts: Cuts = []
    while stop:
        front = fronts[stop]
        start, at = int(front.starts[at]), int(front.parents[at])
        cuts.append((start, stop))
        stop = start
    return cuts[::-1], value
