"""A round that one task's exception cannot spoil for the others (design contract 8).

    run the round -> an action raised: what ran before it counts
                  -> its one task fails; of several, each does its part of the round alone, and fails if it raises again
                  -> before a task fails for want of memory, it does its part once more, recomputing its activations
                  -> the others go on together

Whatever a task has not finished it does again from its chunks on, which are its own: with whom it runs changes no bit.
Where tasks raise together and none of them alone (memory, most likely), passes get narrower from then on. A task that
had to recompute goes on doing so.

The boundary: what it came to, as values; what becomes of a task that raised is for the runner to say.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from muxtune.engine.engine import Engine
from muxtune.engine.failure import PassError, Raised, raised_text
from muxtune.plan.round import Participant
from muxtune.plan.types import ItemOutcome, RoundRecord, StepOutcome, WorkKind


@dataclass(frozen=True, slots=True)
class Parted:
    """Tasks that raised together and not alone."""

    tasks: tuple[str | None, ...]
    rows: int  # that they brought together
    why: Raised


@dataclass(frozen=True, slots=True)
class Round:
    """What a round came to. A task is in `raised` or has finished its part, in one of the records."""

    records: list[RoundRecord] = field(default_factory=list)
    referred: list[RoundRecord] = field(default_factory=list)  # of the bare backbone, for dpo
    raised: dict[str | None, Raised] = field(default_factory=dict)
    spared: dict[str, Raised] = field(default_factory=dict)  # who recomputes from here on, and why
    parted: list[Parted] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[StepOutcome, float]]:
        """The optimizer steps, and the wall time of what each ran in."""
        referred_s = sum(record.wall_s for record in self.referred)
        return [
            (action.step, referred_s + record.wall_s)
            for record in self.records
            for action in record.actions
            if action.step
        ]

    def items(self, task: str | None) -> list[ItemOutcome]:
        """The passes that count: those of the record in which the task finished."""
        return [
            item
            for record in self.records
            if task in record.done
            for action in record.actions
            for item in action.items
            if item.task == task
        ]


def run_round(engine: Engine, participants: Sequence[Participant], kind: WorkKind = "train") -> Round:
    """The participants' part of a round, forward only for another `kind`. Raises StateError and DataError as `execute`
    does; nothing that a pass raises, but for what ends the process."""
    found = Round()
    groups = [list(participants)]
    while groups:
        group = groups.pop(0)
        failed = _execute(engine, group, kind, found)
        if failed is None:
            continue
        names, why = failed
        left = [one for one in group if one.task not in found.records[-1].done]
        members = [one for one in left if one.task in names] or left  # all, where it was a pass of nobody's
        if len(members) == 1:
            task = members[0].task
            if why.memory and kind == "train" and task is not None and engine.spare(task):
                found.spared[task] = why
                groups.append(members)
            else:
                found.raised[task] = why
        else:
            tasks = tuple(one.task for one in members)
            found.parted.append(Parted(tasks, sum(one.widest for one in members), why))
            groups += [[one] for one in members]
        if rest := [one for one in left if one not in members]:
            groups.insert(0, rest)
    found.parted[:] = [one for one in found.parted if not found.raised.keys() & set(one.tasks)]
    for parted in found.parted:
        engine.fuse_below(parted.rows)
    return found


def _execute(
    engine: Engine, group: Sequence[Participant], kind: WorkKind, found: Round
) -> tuple[tuple[str, ...], Raised] | None:
    """Run the group; the tasks of the action that raised, and why. The bare backbone runs for the dpo tasks."""
    try:
        found.referred.extend(filter(None, [engine.refer(group)]))
        found.records.append(engine.execute(engine.schedule(group, kind)))
        return None
    except PassError as error:
        found.records.append(error.record)
        names = error.tasks or tuple(one.task for one in group if one.task is not None and one.loss == "dpo")
        failed = names, raised_text(error.__cause__ or error)
        if not error.tasks:  # the bare backbone keeps nothing that could be computed twice
            failed = names, replace(failed[1], memory=False)
    gc.collect()  # the exception held the whole pass; those who run next need its memory
    return failed
