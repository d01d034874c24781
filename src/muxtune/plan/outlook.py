"""What a policy comes to on a cluster: its plan, laid on the pipeline template and run by the simulator.

On one device fusion's own prediction is the simulator's. On several it is an approximation - bubbles by their closed
form, collectives not at all -, so `muxtune` there simulates the partitions it could be wrong between: the one for a
pipeline of these stages, the one for a single stage, one task at a time, all that fit at once; and buckets from one to
as many as there are hTasks, where members of a bucket overlap. Of what fits, the least wall time wins; of equals the
first.

Where all candidates hold more on some device than there is, they are made again with passes of half the rows, down to
those of the widest task, and in the end with one task a pass.

The boundary: no torch, no clock. Cost: a simulation for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from muxtune.errors import ConfigError
from muxtune.plan.completion import Planned, completion
from muxtune.plan.cost import CostModel
from muxtune.plan.grouping import group
from muxtune.plan.loads import TaskLoad
from muxtune.plan.memory import MemoryModel, size_text
from muxtune.plan.planner import Members, fused, pass_costs, plan_of, rows_of
from muxtune.plan.profile import OperatorTable
from muxtune.plan.simulate import SimTask, balanced_split, sim_task, simulate
from muxtune.plan.timeline import Timeline
from muxtune.plan.types import Plan
from muxtune.spec.cluster import ClusterSpec
from muxtune.spec.policy import Policy

ITERATIONS = 4  # that are simulated where iterations overlap
_BUCKETS = 8  # numbers of buckets that are tried, at most


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan and its simulated run of a few iterations. `done_s`: when each task has taken its last step."""

    plan: Plan
    timeline: Timeline
    done_s: dict[str, float]

    @property
    def iteration_s(self) -> float:
        return self.timeline.wall_s / self.timeline.iterations


class Outlooks:
    """Args:
    cost: with the table's degree of tensor parallelism and the speed of `cluster` (`cost_on`).
    memory: of one device that holds the whole model; its cap is that of each device of the cluster.
    most_rows: that a pass may have whatever memory there is.
    """

    def __init__(
        self,
        loads: Members,
        cost: CostModel,
        memory: MemoryModel,
        cluster: ClusterSpec,
        *,
        most_rows: int | None = None,
    ) -> None:
        self.loads = loads
        self.cost = cost
        self.memory = memory
        self.cluster = cluster.model_copy(update={"speed": 1})  # which `cost` knows already
        self.most_rows = most_rows
        self._split: tuple[int, ...] | None = None

    def of(self, policy: Policy) -> Outlook:
        """The outlook of a policy. Raises ConfigError for what fits on no device, and for more stages than layers."""
        plan, timeline = self._best(self.loads, policy)
        done_s = completion(
            self.loads,
            lambda left: self._planned(left, policy, plan),
            self.cluster,
            layers=self.cost.layers,
            row_bytes=self.cost.table.row_bytes,
            split=self._split,
        )
        return Outlook(plan, timeline, dict(done_s))

    def _planned(self, loads: Sequence[TaskLoad], policy: Policy, first: Plan) -> Planned:
        """Of the tasks that are left, as `completion` asks for it; `first` is the plan of all."""
        plan = first if len(loads) == len(self.loads) else self._best(loads, policy)[0]
        by_name = {load.name: load for load in loads}
        return [self._sim([by_name[name] for name in htask.tasks], policy) for htask in plan.htasks], plan.buckets

    def _best(self, loads: Members, policy: Policy) -> tuple[Plan, Timeline]:
        for partitions in self._attempts(loads, policy):
            found = [
                (self._plan(groups, buckets, policy, timeline, loads), timeline)
                for groups in partitions
                for buckets, timeline in self._timelines(groups, policy)
            ]
            if able := [one for one in found if self._single or self._fits(one[0].peak_bytes)]:
                return min(able, key=lambda one: one[1].wall_s)
        raise _too_small(min(plan.peak_bytes for plan, _ in found), self.memory.cap_bytes or 0)

    @property
    def _single(self) -> bool:
        """Whether fusion itself keeps to the memory."""
        return self.cluster.pp == self.cluster.tp == 1

    def _fits(self, peak_bytes: int) -> bool:
        return self.memory.cap_bytes is None or peak_bytes <= self.memory.cap_bytes

    def _attempts(self, loads: Members, policy: Policy) -> Iterator[Iterator[list[Members]]]:
        """Partitions to choose from, with ever narrower passes."""
        yield self._partitions(loads, policy, self.most_rows)
        all_rows, least = sum(load.peak_rows for load in loads), max(load.peak_rows for load in loads)
        rows = all_rows if self.most_rows is None else min(all_rows, self.most_rows)
        while rows > least:
            rows = max(rows // 2, least)
            yield self._partitions(loads, policy, rows)
        yield self._partitions(loads, "sequential", None)

    def _partitions(self, loads: Members, policy: Policy, most_rows: int | None) -> Iterator[list[Members]]:
        memory = self.memory if self._single else replace(self.memory, cap_bytes=None)

        def of(one: Policy, stages: int = 1) -> list[Members]:
            found = fused(loads, self.cost, memory, one, stages=stages, most_rows=most_rows)
            return found if self._single else sorted(found, key=self._pass_s)

        yield of(policy, self.cluster.pp)
        if policy == "muxtune" and not self._single:
            yield of("muxtune")
            yield of("sequential")
            yield of("fuse-all")

    def _pass_s(self, members: Members) -> float:
        """Seconds of the longest pass: hTasks in this order leave a pipeline the fewest bubbles."""
        return max(one.total_s(self.cost.layers) for one in pass_costs(members, self.cost))

    def _timelines(
        self, groups: Sequence[Members], policy: Policy
    ) -> Iterator[tuple[tuple[tuple[int, ...], ...], Timeline]]:
        tasks = [self._sim(members, policy) for members in groups]
        if self.cluster.pp > 1 and self._split is None:
            self._split = balanced_split(tasks, self.cost.layers, self.cluster.pp)
        seconds = [task.total_s(self.cost.layers) for task in tasks]
        for count in _counts(len(tasks)) if self.cluster.tp > 1 else (len(tasks),):
            buckets = group(seconds, count)
            yield (
                buckets,
                simulate(
                    tasks,
                    buckets,
                    self.cluster,
                    layers=self.cost.layers,
                    row_bytes=self.cost.table.row_bytes,
                    iterations=1 if self._single else ITERATIONS,
                    split=self._split,
                    memory=self.memory,
                ),
            )

    def _sim(self, members: Members, policy: Policy) -> SimTask:
        costs = pass_costs(members, self.cost, policy)
        steps_s = sum(self.cost.step_s(load) for load in members)
        return sim_task(members, costs, steps_s, self.memory, rows_of(policy))

    def _plan(
        self,
        groups: Sequence[Members],
        buckets: tuple[tuple[int, ...], ...],
        policy: Policy,
        timeline: Timeline,
        loads: Members,
    ) -> Plan:
        plan = plan_of(groups, loads, self.cost, self.memory, policy, stages=self.cluster.pp)
        return replace(
            plan,
            buckets=buckets,
            iteration_s=timeline.wall_s / timeline.iterations,
            peak_bytes=plan.peak_bytes if self._single else max(timeline.peak_bytes),
        )


def _counts(htasks: int) -> list[int]:
    """Numbers of buckets to try: all where there are few, else evenly spread, the largest among them."""
    if htasks <= _BUCKETS:
        return list(range(1, htasks + 1))
    return sorted({max(1, htasks * place // _BUCKETS) for place in range(1, _BUCKETS + 1)})


def _too_small(needed_bytes: int, cap_bytes: int) -> ConfigError:
    return ConfigError(
        f"a device would hold {size_text(needed_bytes)} even with one task a pass, which is "
        f"{size_text(needed_bytes - cap_bytes)} more than it has",
        where="memory",
        hint="plan for more devices (tp, pp), more memory each, fewer tasks or a smaller max_length; "
        "chunks do not shrink for the memory of a cluster",
    )


def cost_on(table: OperatorTable, cluster: ClusterSpec, *, recompute: bool = False) -> CostModel:
    """The cost model for a cluster. Raises ConfigError for a degree that the table has not measured."""
    if cluster.tp not in table.layer:
        known = ", ".join(map(str, sorted(table.layer)))
        raise ConfigError(
            f"what operators cost at degree {cluster.tp} was not measured",
            where="tp",
            hint=f"measured for this model: {known}",
        )
    return CostModel(table, degree=cluster.tp, recompute=recompute, scale=1 / cluster.speed)
