"""What one stage of a pipeline does in a round, in order: the dates of `muxtune.plan.pipeline`, for a `RoundSchedule`.

A schedule says in which order passes go forward; on S stages pass n has a tick, the one after that of pass n - 1 or S
after that of a pass whose way back it awaits. From the ticks follow the dates, and from these each stage's order (1F1B
across tasks). The last pass of a task before its step is where the gradient of the step is whole.

A pass awaits the way back of an earlier one
    of the same task, if the task steps between them;
    of the same task, if both have pieces of cut sequences and one of them only goes forward or runs again on its way
    back: which keys and values a piece finds is decided by what ran just before it.

Every pass comes back: one that only goes forward to tell the other stages what it came to, which costs no tick here.

`plain_turns` is the twin: a pass is back before the next one begins.

The boundary: integers and names in, integers out. Cost: n log n, and n^2 comparisons of passes with cut sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muxtune.plan.pipeline import Direction
from muxtune.plan.types import MicroBatch, OptimStep, RoundSchedule, tasks_of


@dataclass(frozen=True, slots=True)
class Turn:
    """Work of a stage: action `index` of the schedule, in one direction. `closes`: indices of the steps whose gradient
    is whole after it, on this stage."""

    direction: Direction
    index: int
    closes: tuple[int, ...] = ()


def stage_turns(schedule: RoundSchedule, stages: int, stage: int) -> tuple[Turn, ...]:
    """What the stage does, in order; free of deadlock with what the others do."""
    ticks = _ticks(schedule, stages)
    closes = _closed(schedule)
    closed = {step: index for index, steps in closes.items() for step in steps}
    dated: list[tuple[int, bool, Turn]] = []
    for index, action in enumerate(schedule.actions):
        if isinstance(action, MicroBatch):
            tick = ticks[index]
            dated.append((2 * tick + stage, True, Turn("forward", index)))
            back = Turn("backward", index, closes.get(index, ()))
            dated.append((2 * (tick + stages) - 1 - stage, True, back))
        else:  # a step whose passes ran in an earlier schedule comes before all others
            date = 2 * (ticks[closed[index]] + stages) + stage if index in closed else -1
            dated.append((date, False, _step(index, closed)))
    return tuple(turn for _, _, turn in sorted(dated, key=lambda one: (one[0], one[1])))


def plain_turns(schedule: RoundSchedule) -> tuple[Turn, ...]:
    """The twin, the same on each stage."""
    closes = _closed(schedule)
    closed = {step: index for index, steps in closes.items() for step in steps}
    turns: list[Turn] = []
    for index, action in enumerate(schedule.actions):
        if isinstance(action, MicroBatch):
            turns += [Turn("forward", index), Turn("backward", index, closes.get(index, ()))]
        else:
            turns.append(_step(index, closed))
    return tuple(turns)


def _step(index: int, closed: dict[int, int]) -> Turn:
    """One whose passes are not in the schedule closes by itself."""
    return Turn("step", index, () if index in closed else (index,))


def _closed(schedule: RoundSchedule) -> dict[int, tuple[int, ...]]:
    """Of passes, the steps that follow a last pass of their task."""
    latest: dict[str | None, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for index, action in enumerate(schedule.actions):
        if isinstance(action, OptimStep):
            last = latest.get(action.task)
            if last is not None:
                found[last] = (*found.get(last, ()), index)
        else:
            latest |= dict.fromkeys(tasks_of(action), index)
    return found


def _ticks(schedule: RoundSchedule, stages: int) -> dict[int, int]:
    """Of each pass."""
    ticks: dict[int, int] = {}
    stepped: dict[str | None, int] = {}  # of each task, the tick of its last pass before its last step
    latest: dict[str | None, int] = {}
    cut: list[tuple[int, MicroBatch]] = []  # passes with cut sequences, and their ticks
    tick = -1
    for index, action in enumerate(schedule.actions):
        if isinstance(action, OptimStep):
            if action.task in latest:
                stepped[action.task] = latest[action.task]
            continue
        awaited = [stepped[task] for task in tasks_of(action) if task in stepped]
        if _has_pieces(action):
            awaited += [other for other, before in cut if _in_turn(before, action)]
        tick = max([tick + 1, *(one + stages for one in awaited)])
        ticks[index] = tick
        latest |= dict.fromkeys(tasks_of(action), tick)
        if _has_pieces(action):
            cut.append((tick, action))
    return ticks


def _has_pieces(batch: MicroBatch) -> bool:
    return any(ref.cut for item in batch.items for ref in item.sequences)


def _in_turn(before: MicroBatch, batch: MicroBatch) -> bool:
    """Whether two passes with pieces of cut sequences may not be on their way at once."""
    common = _whose_pieces(before) & _whose_pieces(batch)
    return bool(common) and before.trains and (not batch.trains or before.recompute or batch.recompute)


def _whose_pieces(batch: MicroBatch) -> set[Sequence[object]]:
    return {(item.task, item.source) for item in batch.items if any(ref.cut for ref in item.sequences)}
