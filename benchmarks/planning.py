"""What planning takes, and what the fixed order of tasks gives up.

Time: hTasks of 64 and of 1,000 drawn tasks, on one stage and on four. Gap: of loads of up to seven tasks, drawn by
seed, the value of the planner's partition over that of the best of *all* partitions, on made-up devices that 32, 256
and 4,096 rows fill, with and without a bound on the rows of a pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.made_up import partitions, table
from muxtune.plan.cost import CostModel
from muxtune.plan.fusion import HTASK_S, fuse_optimally
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad, passes
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable

KNEES = (32, 256, 4096)
BOUNDS = (None, 512)
DRAWN = 40
MOST_TASKS = 7
REPEATS = 3


@dataclass(frozen=True, slots=True)
class PlanningCosts:
    """`seconds`: by number of tasks and stages, the least of some runs. `gaps`: 0.02 is 2 % above the best."""

    seconds: dict[str, float]
    gaps: tuple[float, ...]

    @property
    def exact(self) -> float:
        """The part of the loads whose plan is the best of all."""
        return statistics.mean(gap < 1e-9 for gap in self.gaps)


def planning_costs() -> PlanningCosts:
    seconds = {
        f"{tasks} tasks, {stages} stage{'s' * (stages > 1)}": _planned_s(tasks, stages)
        for tasks in (64, 1000)
        for stages in (1, 4)
    }
    return PlanningCosts(seconds, tuple(_gaps()))


def _planned_s(tasks: int, stages: int) -> float:
    loads = _loads(np.random.default_rng(tasks), tasks)
    cost, took = CostModel(_device(256)), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        fuse_optimally(loads, cost, MemoryModel(), stages=stages)
        took.append(time.perf_counter() - began)
    return min(took)


def _gaps() -> Iterator[float]:
    for knee in KNEES:
        cost = CostModel(_device(knee))
        for seed in range(DRAWN):
            rng = np.random.default_rng([knee, seed])
            loads = _loads(rng, int(rng.integers(2, MOST_TASKS + 1)))
            for bound in BOUNDS:
                most = None if bound is None else max(bound, *(load.peak_rows for load in loads))
                planned = fuse_optimally(loads, cost, MemoryModel(), most_rows=most).value_s
                yield planned / min(_value_s(one, cost) for one in partitions(loads) if _fits(one, most)) - 1


def _device(knee: int) -> OperatorTable:
    """Entering a pass takes as long as a tenth of a layer."""
    return table(knee, entry_s=1e-4)


def _fits(partition: Sequence[Sequence[TaskLoad]], most: int | None) -> bool:
    return most is None or all(sum(load.peak_rows for load in htask) <= most for htask in partition)


def _value_s(partition: Sequence[Sequence[TaskLoad]], cost: CostModel) -> float:
    return sum(
        HTASK_S
        + sum(cost.pass_cost(running).total_s(cost.layers) for running in passes(htask))
        + sum(cost.step_s(load) for load in htask)
        for htask in partition
    )


def _loads(rng: np.random.Generator, tasks: int) -> list[TaskLoad]:
    """Tasks of one to three chunks of up to 400 rows."""
    made = []
    for place in range(tasks):
        rows = rng.integers(16, 400, size=rng.integers(1, 4)).tolist()
        chunks = tuple(ChunkLoad((Span(count, count),), count // 2) for count in rows)
        made.append(TaskLoad(f"task-{place}", chunks, parameters=1000))
    return made
