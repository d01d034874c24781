"""From what tasks bring, and what operators cost here, to a plan: who is fused with whom, and what that should take.

`muxtune` fuses by dynamic programming (`muxtune.plan.fusion`). The baselines are plans too, predicted by the same
model: `sequential` runs one task at a time, `fuse-all` as many as one pass may hold, in the order they come, `padded`
likewise with every sequence as long as the longest of its pass.

The boundary: loads, a cost model and a memory model in, a `Plan` out; no clock, no files. What a plan says of time is
a prediction of one iteration, an optimizer step of every task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muxtune.plan.cost import CostModel, PassCost
from muxtune.plan.fusion import fuse_optimally
from muxtune.plan.loads import TaskLoad, packed_rows, padded_to_longest, passes, widest_span
from muxtune.plan.memory import MemoryModel
from muxtune.plan.round import neighbours
from muxtune.plan.types import HTask, Plan
from muxtune.spec.policy import Policy

Members = Sequence[TaskLoad]


def make_plan(
    loads: Members,
    cost: CostModel,
    memory: MemoryModel,
    policy: Policy = "muxtune",
    *,
    stages: int = 1,
    most_rows: int | None = None,
    also_held: Members = (),
) -> Plan:
    """The plan of these tasks under a policy, each hTask a bucket of its own.

    Args:
        most_rows: that a pass may have, whatever memory there is.
        also_held: tasks that hold memory but do not run now.

    Raises ConfigError for a task that does not fit even alone.
    """
    groups = fused(loads, cost, memory, policy, stages=stages, most_rows=most_rows, also_held=also_held)
    return plan_of(groups, [*loads, *also_held], cost, memory, policy, stages=stages)


def plan_of(
    groups: Sequence[Members], held: Members, cost: CostModel, memory: MemoryModel, policy: Policy, *, stages: int = 1
) -> Plan:
    """The plan that runs these groups as hTasks; `held` are all tasks that hold memory."""
    htasks = tuple(_htask(group, cost, policy) for group in groups)
    return Plan(
        policy,
        htasks,
        tuple((place,) for place in range(len(htasks))),
        stages,
        sum(htask.predicted_s for htask in htasks),
        memory.peak_bytes(held, groups, rows_of(policy)),
        memory.cap_bytes,
    )


def fused(
    loads: Members,
    cost: CostModel,
    memory: MemoryModel,
    policy: Policy,
    *,
    stages: int = 1,
    most_rows: int | None = None,
    also_held: Members = (),
) -> list[Members]:
    """The hTasks of a policy, as loads. Raises as `make_plan` does."""
    if policy == "muxtune":
        found = fuse_optimally(loads, cost, memory, stages=stages, most_rows=most_rows, also_held=also_held)
        return list(found.htasks)
    if policy == "sequential":
        return [(load,) for load in loads]
    return [tuple(group) for group in neighbours(loads, rows_of(policy), _most(loads, memory, most_rows, also_held))]


def rows_of(policy: Policy) -> Callable[[Members], int]:
    """What counts the rows of the largest pass of an hTask."""
    return padded_to_longest if policy == "padded" else packed_rows


def _most(loads: Members, memory: MemoryModel, most_rows: int | None, also_held: Members) -> int | None:
    """Rows of a pass that memory and `most_rows` allow."""
    free_bytes = memory.free_bytes([*loads, *also_held])
    if free_bytes is None or not loads:
        return most_rows
    rows = memory.rows_within(free_bytes, max(load.longest for load in loads))
    return rows if most_rows is None else min(rows, most_rows)


def _short(rows: int, loads: Members, memory: MemoryModel, also_held: Members) -> int:
    """Bytes that a pass of so many rows wants beside what there is, reckoned as `_most` does."""
    free_bytes = memory.free_bytes([*loads, *also_held])
    return (
        0 if free_bytes is None else max(0, memory.pass_bytes(rows, max(load.longest for load in loads)) - free_bytes)
    )


def pass_costs(members: Members, cost: CostModel, policy: Policy = "muxtune") -> list[PassCost]:
    """What the passes of an hTask take, optimizer steps not counted."""
    found = []
    for running in passes(members):
        found.append(cost.pass_cost(running, width=widest_span(running) if policy == "padded" else 0))
    return found


def _htask(members: Members, cost: CostModel, policy: Policy) -> HTask:
    costs = pass_costs(members, cost, policy)
    seconds = sum(one.total_s(cost.layers) for one in costs) + sum(cost.step_s(load) for load in members)
    return HTask(tuple(load.name for load in members), max(one.rows for one in costs), len(costs), seconds)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an hTask ends where it does: seconds of an iteration, and bytes of its largest pass.

    Attributes:
        alone_s, fused_s: of its members one at a time, and as they are.
        more_s: what the iteration would take more, or less, if the next hTask ran in it too; None for the last.
        more_bytes, more_rows: what it would then hold in all, and the rows of its largest pass; `fits`: whether it may.
        short_bytes: of memory that it would want beside what there is; 0 where it is not memory that forbids it.
        most_rows: that a pass may have; None: any number.
    """

    htask: int
    alone_s: float
    fused_s: float
    more_s: float | None = None
    more_bytes: int = 0
    fits: bool = True
    more_rows: int = 0
    short_bytes: int = 0
    most_rows: int | None = None


def reasons(
    plan: Plan,
    loads: Members,
    cost: CostModel,
    memory: MemoryModel,
    *,
    most_rows: int | None = None,
    also_held: Members = (),
) -> list[Reason]:
    """Of each hTask of a plan that was made on these."""
    by_name = {load.name: load for load in loads}
    groups = [[by_name[name] for name in htask.tasks] for htask in plan.htasks]
    most = _most(loads, memory, most_rows, also_held)
    count = rows_of(plan.policy)
    found = []
    for place, group in enumerate(groups):
        own_s = plan.htasks[place].predicted_s
        alone_s = sum(_htask([load], cost, plan.policy).predicted_s for load in group)
        if place + 1 == len(groups):
            found.append(Reason(place, alone_s, own_s))
            continue
        together = [*group, *groups[place + 1]]
        more_s = _htask(together, cost, plan.policy).predicted_s - own_s - plan.htasks[place + 1].predicted_s
        needed = memory.peak_bytes([*loads, *also_held], [together], count)
        rows = count(together)
        able, short = most is None or rows <= most, _short(rows, loads, memory, also_held)
        found.append(Reason(place, alone_s, own_s, more_s, needed, able, rows, 0 if able else short, most))
    return found


def ineffective(plan: Plan, loads: Members, cost: CostModel) -> float:
    """The part of the rows of an iteration that is no token of a chunk: padding, and what fills up the last rows."""
    by_name = {load.name: load for load in loads}
    run = real = 0
    for htask in plan.htasks:
        members = [by_name[name] for name in htask.tasks]
        run += sum(one.rows for one in pass_costs(members, cost, plan.policy))
        real += sum(chunk.rows for load in members for chunk in load.chunks)
    return 1 - real / run if run else 0.0
