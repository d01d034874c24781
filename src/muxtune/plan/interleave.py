"""A round in which several hTasks share slots: pass c of each of them, then the steps of whoever is done.

`derive_round` runs one hTask after another. Where collectives can overlap with others' compute, neighbours take turns
instead. A task's own passes and its step stay in its own order, so nothing that it computes changes.

    A0 A1 stepA B0 stepB C0 stepC   with 2 together   A0 B0 stepB A1 stepA C0 stepC
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from muxtune.plan.types import Action, MicroBatch, OptimStep, RoundSchedule, tasks_of

_Turn = tuple[MicroBatch, tuple[OptimStep, ...]]  # a pass, and the steps that follow it


def interleaved(schedule: RoundSchedule, together: int) -> RoundSchedule:
    """The same actions with up to `together` neighbouring hTasks taking turns."""
    assert together >= 1, together
    htasks = [list(own) for _, own in groupby(_turns(schedule.actions), key=lambda turn: turn[0].htask)]
    actions: list[Action] = []
    for first in range(0, len(htasks), together):
        for turns in zip_longest(*htasks[first : first + together]):
            present = [turn for turn in turns if turn is not None]
            actions += [batch for batch, _ in present]
            actions += [step for _, steps in present for step in steps]
    assert len(actions) == len(schedule.actions), "a step before the first pass"
    return replace(schedule, actions=tuple(actions))


def slots(actions: Sequence[Action]) -> list[range]:
    """Runs of actions that may overlap: neighbouring passes that train, each of other tasks, none of which keeps
    activations or goes on from them. Every other action is one by itself."""
    found: list[range] = []
    taken: set[str | None] = set()
    for index, action in enumerate(actions):
        own = set(tasks_of(action))
        if _overlaps(action) and taken and not own & taken:
            found[-1] = range(found[-1].start, index + 1)
            taken |= own
        else:
            found.append(range(index, index + 1))
            taken = own if _overlaps(action) else set()
    return found


def _overlaps(action: Action) -> bool:
    return isinstance(action, MicroBatch) and action.trains and not action.keep


def _turns(actions: Sequence[Action]) -> list[_Turn]:
    turns: list[_Turn] = []
    for action in actions:
        if isinstance(action, MicroBatch):
            turns.append((action, ()))
        elif turns:
            batch, steps = turns[-1]
            turns[-1] = batch, (*steps, action)
    return turns
