"""Plain twins of fusion: partitions, each valued pass by pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from muxtune.plan.cost import CostModel
from muxtune.plan.fusion import HTASK_S, bottleneck
from muxtune.plan.loads import TaskLoad
from muxtune.plan.memory import MemoryModel

Partition = Sequence[Sequence[TaskLoad]]


def neighbours(ordered: Sequence[TaskLoad]) -> Iterator[list[list[TaskLoad]]]:
    """All partitions into runs of neighbours."""
    if not ordered:
        yield []
        return
    for size in range(1, len(ordered) + 1):
        for rest in neighbours(ordered[size:]):
            yield [list(ordered[:size]), *rest]


def value_s(partition: Partition, cost: CostModel, stages: int = 1) -> float:
    """What `fuse_optimally` minimises, from whole passes."""
    sums, longest = 0.0, 0.0
    for htask in partition:
        slots = sorted({slot for task in htask for slot in task.slots})
        passes = [
            cost.pass_cost([(task, task.slots[slot]) for task in htask if slot in task.slots]).total_s(cost.layers)
            for slot in slots
        ]
        sums += sum(passes) + sum(cost.step_s(task) for task in htask) + HTASK_S
        longest = max(longest, *passes)
    return bottleneck(cost.layers, stages) * (sums + (stages - 1) * longest)


def feasible(
    partition: Partition, memory: MemoryModel, tasks: Sequence[TaskLoad], most_rows: int | None = None
) -> bool:
    free = memory.free_bytes(tasks)
    for htask in partition:
        rows = sum(task.peak_rows for task in htask)
        needed = memory.pass_bytes(rows, max(task.longest for task in htask))
        if (most_rows is not None and rows > most_rows) or (free is not None and needed > free):
            return False
    return True
