"""What rows the passes of a load have: counted on schedules, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.loads import Load
from benchmarks.sides import EngineSide
from muxtune.plan.cost import ROW_MULTIPLE
from muxtune.plan.types import MicroBatch, RoundSchedule


def schedules(side: EngineSide, load: Load) -> Iterator[RoundSchedule]:
    """The round of each step of the load, as the side would run it now. The side's tasks are at step 0 afterwards."""
    for step in range(load.steps):
        for task in side.tasks:
            task.step = step
        yield side.engine.schedule([task.participant() for task in side.tasks])
    for task in side.tasks:
        task.step = 0


def ineffective(side: EngineSide, load: Load) -> float:
    """The part of all rows of all steps that is no token."""
    rows = tokens = 0
    for schedule in schedules(side, load):
        rows += _rows(schedule)
        tokens += sum(action.tokens for action in schedule.actions if isinstance(action, MicroBatch))
    return 1 - tokens / rows


def _rows(schedule: RoundSchedule) -> int:
    found = 0
    for action in schedule.actions:
        if isinstance(action, MicroBatch):
            rows = sum(max(ref.length, action.width) for item in action.items for ref in item.sequences)
            found += rows + -rows % ROW_MULTIPLE
    return found
