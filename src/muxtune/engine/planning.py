"""Plans for the tasks of an engine: made when who runs changes, and again when predictions have drifted.

A plan is renewed between rounds and takes milliseconds (`muxtune.plan.fusion`). It decides with whom a task runs, never
what it computes: batches, order, chunks and steps are the task's own, so a run's bits are the same under any plan
(design contract 1).

The boundary: tasks in, a `Plan` out, and what ran comes back as records. Memory is what admission has found; a task
that it let in runs, so its own passes always fit here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from muxtune.engine.loads import Sources, load_of_task, pass_s
from muxtune.engine.task import Task
from muxtune.models.memory import Footprint
from muxtune.plan.cost import CostModel
from muxtune.plan.loads import TaskLoad
from muxtune.plan.memory import MemoryModel
from muxtune.plan.planner import make_plan
from muxtune.plan.profile import OperatorTable
from muxtune.plan.refine import Refinement
from muxtune.plan.types import MicroBatch, Plan, RoundRecord, tasks_of
from muxtune.spec.peft import Place


@dataclass(frozen=True, slots=True)
class _Ground:
    """What a plan was made for: it is renewed when this changes."""

    running: frozenset[str]
    held: frozenset[str]
    most_rows: int
    keep_tokens: int
    scale: float


class Planning:
    """Args:
    table: what operators cost here; asked for when there is a choice to make, since it may have to be measured first.
    memory: what there is; its cap may be None.
    places: every attach point of the base model.
    refine: whether what passes took corrects predictions, and makes a new plan where they were far off.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        table: Callable[[], OperatorTable],
        memory: MemoryModel,
        places: Sequence[Place],
        *,
        recompute: bool = False,
        refine: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._table = table
        self._memory = memory
        self._places = places
        self._recompute = recompute
        self._clock = clock
        self._known: OperatorTable | None = None
        self._loads: WeakKeyDictionary[Task, TaskLoad] = WeakKeyDictionary()  # a task that is detached is let go of
        self._keep_tokens = 0  # that loads have been made with
        self._ground: _Ground | None = None
        self._refine = refine
        self._refinement = Refinement()
        self.plan: Plan | None = None
        self.planned_s = 0.0  # what the last plan took to make

    def renew(self, running: Sequence[Task], held: Sequence[Task], most_rows: int, keep_tokens: int = 0) -> Plan | None:
        """The plan in force for these tasks; None where there is nothing to choose.

        Args:
            held: tasks that are attached and do not run now.
            most_rows: that tasks may bring to a pass together.
            keep_tokens: rows of cut sequences whose activations may be kept between passes.
        """
        if keep_tokens != self._keep_tokens:
            self._keep_tokens = keep_tokens
            self._loads.clear()
        ground = _Ground(_names(running), _names(held), most_rows, keep_tokens, self._refinement.planned)
        if len(running) < 2:
            self.plan, self._ground = None, None
        elif ground != self._ground:
            began_s = self._clock()
            self.plan, self._ground = self._made(running, held, most_rows), ground
            self.planned_s = self._clock() - began_s
        return self.plan

    def cost(self) -> CostModel:
        """What predictions are made with now. Measures what operators cost, where that is not known yet."""
        self._known = self._known or self._table()
        return CostModel(self._known, recompute=self._recompute, scale=self._refinement.planned)

    def observe(self, record: RoundRecord, tasks: Mapping[str, Task], sources: Sources) -> None:
        """Learn from what passes took. Where predictions have drifted, the next plan is made with what was learnt."""
        if not self._refine or self.plan is None or self._known is None:
            return
        cost = CostModel(self._known, recompute=self._recompute)
        passes = []
        for done in record.actions:
            action = record.schedule.actions[done.action]
            if isinstance(action, MicroBatch) and self._is_predicted(action, tasks):
                loads = {name: self.load(tasks[name]) for name in tasks_of(action) if name is not None}
                passes.append((pass_s(action, cost, tasks, loads, sources), done.end_s - done.start_s))
        self._refinement.learn(passes)
        if self._refinement.drifted:
            self._refinement.planned_anew()

    def _is_predicted(self, batch: MicroBatch, tasks: Mapping[str, Task]) -> bool:
        """Activations that are computed twice for one task alone are in no prediction; nor are tasks without data,
        which only answer or are driven by a client."""
        known = all(tasks[name].data.train for name in tasks_of(batch) if name is not None)
        return known and (not batch.trains or batch.resumes or batch.recompute == self._recompute)

    def load(self, task: Task) -> TaskLoad:
        """What a task brings to a round."""
        known = self._loads.get(task)
        if known is None:
            known = self._loads[task] = load_of_task(task, self._places, keep_tokens=self._keep_tokens)
        return known

    def _made(self, running: Sequence[Task], held: Sequence[Task], most_rows: int) -> Plan:
        cost = self.cost()
        loads, beside = ([self.load(task) for task in tasks] for tasks in (running, held))
        most_rows = max(most_rows, *(load.peak_rows for load in loads))
        return make_plan(loads, cost, self._with_room(loads, beside), most_rows=most_rows, also_held=beside)

    def _with_room(self, loads: Sequence[TaskLoad], beside: Sequence[TaskLoad]) -> MemoryModel:
        """The memory model with a cap that every task alone is within."""
        memory = replace(self._memory, keep_tokens=self._keep_tokens)
        if memory.cap_bytes is None:
            return memory
        held = memory.held_bytes([*loads, *beside])
        least = held + max(memory.pass_bytes(load.peak_rows, load.longest) for load in loads)
        return replace(memory, cap_bytes=max(memory.cap_bytes, least))


def memory_model(model: Footprint, *, process_bytes: int, limit_bytes: int | None, keep_tokens: int = 0) -> MemoryModel:
    """What admission reckons with, as the planner knows it."""
    return MemoryModel(
        base_bytes=process_bytes + model.weights_bytes,
        head_bytes=model.head_bytes,
        row_bytes=model.row_bytes,
        score_bytes=model.score_bytes,
        position_bytes=model.position_bytes,
        cap_bytes=limit_bytes,
        keep_tokens=keep_tokens,
    )


def _names(tasks: Sequence[Task]) -> frozenset[str]:
    return frozenset(task.name for task in tasks)
