"""A plan on any cluster, in discrete events: what runs where and when, before there are any devices.

Each stage runs its list of the pipeline template (`muxtune.plan.pipeline`) in order; a pass starts when what it needs
has arrived and the stage is free. With tp > 1 the passes of a slot run as chains of subgraphs whose collectives overlap
with the others' compute (`muxtune.plan.overlap`), and its last collectives with the next slot's compute.

    compute      PassCost / speed: entry on the first stage, the stage's layers, exit on the last one's way forward
    collective   two of rows x row_bytes a layer and direction, alpha-beta (`ClusterSpec.all_reduce_s`)
    send         rows x row_bytes to the neighbour, alpha-beta; the two directions of a link do not disturb each other
    step         the stage's share of the optimizer steps, after the norm has come back from stage 0, a latency a stage

The template's order of all stages' work is one in which everything comes after what it needs, and every resource is
used in one fixed order: so one sweep over that order finds the times that a queue of events would. Approximate are: the
two halves of a layer, one latency a collective, no contention of links, no collectives of embedding, head,
recomputation or norm, and steps of an hTask's members all at its end.

The boundary: numbers, no torch, no clock. On one device the wall time is the sum of the passes and steps. Cost: a
microsecond or few an event; with tp > 1 there are four a layer and pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muxtune.plan.cost import PassCost
from muxtune.plan.loads import TRAINS, TaskLoad, packed_rows
from muxtune.plan.memory import MemoryModel
from muxtune.plan.overlap import Chain, backward_chain, forward_chain, list_schedule
from muxtune.plan.pipeline import Slot, StageAction, make_template
from muxtune.plan.stages import NOTHING, Footprint, split_layers, stage_peaks
from muxtune.plan.timeline import Event, Resource, ResourceKind, Timeline, Work
from muxtune.spec.cluster import ClusterSpec


@dataclass(frozen=True, slots=True)
class SimPass:
    """`trains`: whether it comes back; one that only carries goes forward."""

    cost: PassCost
    trains: bool = True


@dataclass(frozen=True, slots=True)
class SimTask:
    """An hTask, one iteration: its members, its passes in order (the last one trains), the seconds of all members'
    steps together and their trained rows, and what it holds."""

    tasks: tuple[str, ...]
    passes: tuple[SimPass, ...]
    step_s: float = 0.0
    tokens: int = 0
    footprint: Footprint = NOTHING

    def total_s(self, layers: int) -> float:
        """One iteration on the measured device, if nothing is in its way."""
        return sum(one.cost.total_s(layers) for one in self.passes) + self.step_s


def sim_task(
    members: Sequence[TaskLoad],
    costs: Sequence[PassCost],
    step_s: float,
    memory: MemoryModel | None = None,
    rows_of: Callable[[Sequence[TaskLoad]], int] = packed_rows,
) -> SimTask:
    """The hTask of these members, given what its passes cost, in order (`muxtune.plan.planner.pass_costs`), and all
    members' steps together. What it holds is known where there is a memory model; `rows_of` counts its largest pass."""
    slots = sorted(set().union(*(member.slots for member in members)))
    footprint = NOTHING
    if memory is not None:
        rows, longest = rows_of(members), max(member.longest for member in members)
        held = memory.held_bytes(members) - memory.base_bytes
        footprint = Footprint(held, memory.pass_bytes(rows, longest) - memory.head_bytes)
    return SimTask(
        tuple(member.name for member in members),
        tuple(SimPass(cost, part >= TRAINS) for cost, (_, part) in zip(costs, slots, strict=True)),
        step_s,
        sum(member.tokens for member in members),
        footprint,
    )


def balanced_split(tasks: Sequence[SimTask], layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, balanced by the cost of these hTasks. Raises ConfigError for more stages than layers."""
    costs = [one.cost for task in tasks for one in task.passes]
    return split_layers(
        layers,
        stages,
        layer_s=sum(cost.forward_s + cost.backward_s for cost in costs),
        entry_s=sum(cost.entry_s for cost in costs),
        exit_s=sum(cost.exit_s for cost in costs),
    )


def simulate(
    tasks: Sequence[SimTask],
    buckets: Sequence[Sequence[int]],
    cluster: ClusterSpec,
    *,
    layers: int,
    row_bytes: int,
    iterations: int = 1,
    split: Sequence[int] | None = None,
    memory: MemoryModel | None = None,
) -> Timeline:
    """So many iterations of all hTasks, one after another where they must be.

    Args:
        buckets: the places of the hTasks, each in one bucket; members overlap inside a stage where tp > 1.
        layers, row_bytes: of the model (`OperatorTable`).
        split: layers of each stage; balanced for these hTasks where nothing is said.
        memory: for `Timeline.peak_bytes`.

    Raises ConfigError for more stages than layers.
    """
    own_layers = tuple(split) if split is not None else balanced_split(tasks, layers, cluster.pp)
    assert len(own_layers) == cluster.pp and sum(own_layers) == layers, (own_layers, cluster.pp, layers)
    trains = [[one.trains for one in task.passes] for task in tasks]
    pass_s = [task.total_s(layers) / len(task.passes) for task in tasks]
    template = make_template(trains, buckets, cluster.pp, iterations=iterations, together=cluster.tp > 1, pass_s=pass_s)
    run = _Run(tasks, cluster, own_layers, row_bytes)
    for slot in template.order:
        run.slot(slot)
    return Timeline(
        cluster.pp,
        tuple(run.events),
        max(event.end_s for event in run.events),
        iterations,
        iterations * sum(task.tokens for task in tasks),
        own_layers,
        stage_peaks(template, [task.footprint for task in tasks], memory, own_layers, tp=cluster.tp)
        if memory is not None
        else (),
    )


class _Run:
    """Times so far: of each resource, until when it is taken; of each action on each stage, when it may start."""

    def __init__(self, tasks: Sequence[SimTask], cluster: ClusterSpec, layers: Sequence[int], row_bytes: int) -> None:
        self.tasks = tasks
        self.cluster = cluster
        self.layers = layers
        self.row_bytes = row_bytes
        self.events: list[Event] = []
        self.free_s: dict[Resource, float] = {}
        self.ready_s: dict[tuple[int, StageAction], float] = {}
        self.resources: dict[tuple[ResourceKind, int], Resource] = {}
        self.chains: dict[tuple[str, int, int, int], Chain] = {}

    def slot(self, slot: Slot) -> None:
        if slot.direction != "step" and self.cluster.tp > 1:
            self._overlapped(slot)
            return
        for action in slot.actions:
            seconds = (
                self._step_s(slot.stage, action) if action.direction == "step" else self._pass_s(slot.stage, action)
            )
            end = self._take("compute", slot.stage, self._ready(slot.stage, action), seconds, action.direction, action)
            self._pass_on(slot.stage, action, end)

    def _overlapped(self, slot: Slot) -> None:
        compute, link = self._resource("compute", slot.stage), self._resource("collective", slot.stage)
        launches = list_schedule(
            [self._chain(slot.stage, action) for action in slot.actions],
            [self._ready(slot.stage, action) for action in slot.actions],
            compute_free_s=self.free_s.get(compute, 0.0),
            link_free_s=self.free_s.get(link, 0.0),
        )
        ends = [0.0] * len(slot.actions)
        for launch in launches:
            action = slot.actions[launch.chain]
            self._record(compute, launch.start_s, launch.end_s, action.direction, action)
            if launch.collective_end_s > launch.collective_start_s:
                self._record(link, launch.collective_start_s, launch.collective_end_s, "comm", action)
            ends[launch.chain] = launch.collective_end_s
        for action, end in zip(slot.actions, ends, strict=True):
            self._pass_on(slot.stage, action, end)

    def _pass_on(self, stage: int, action: StageAction, end_s: float) -> None:
        """To the next stage that needs it."""
        last = self.cluster.pp - 1
        htask, chunk, iteration = action.htask, action.chunk, action.iteration
        if action.direction == "forward" and stage < last:
            self.ready_s[stage + 1, action] = self._send("forward link", stage, action, end_s)
        elif action.direction == "forward":
            self.ready_s[stage, StageAction("backward", htask, chunk, iteration)] = end_s
        elif action.direction == "backward" and stage > 0:
            self.ready_s[stage - 1, action] = self._send("backward link", stage, action, end_s)
        elif action.direction == "backward" and chunk == len(self.tasks[htask].passes) - 1:
            step = StageAction("step", htask, chunk, iteration)
            for other in range(last + 1):
                self.ready_s[other, step] = end_s + other * self.cluster.send_s(0)

    def _ready(self, stage: int, action: StageAction) -> float:
        return 0.0 if action.direction == "forward" and stage == 0 else self.ready_s.pop((stage, action))

    def _send(self, kind: ResourceKind, stage: int, action: StageAction, ready_s: float) -> float:
        seconds = self.cluster.send_s(self._cost(action).rows * self.row_bytes)
        return self._take(kind, stage, ready_s, seconds, "send", action)

    def _take(
        self, kind: ResourceKind, stage: int, ready_s: float, seconds: float, what: Work, action: StageAction
    ) -> float:
        """The end of what a resource does as soon as it is free."""
        resource = self._resource(kind, stage)
        start = max(ready_s, self.free_s.get(resource, 0.0))
        self._record(resource, start, start + seconds, what, action)
        return start + seconds

    def _record(self, resource: Resource, start_s: float, end_s: float, what: Work, action: StageAction) -> None:
        self.free_s[resource] = max(end_s, self.free_s.get(resource, 0.0))
        self.events.append(Event(resource, start_s, end_s, what, action, self.tasks[action.htask].tasks))

    def _resource(self, kind: ResourceKind, stage: int) -> Resource:
        return self.resources.setdefault((kind, stage), Resource(kind, stage))

    def _cost(self, action: StageAction) -> PassCost:
        return self.tasks[action.htask].passes[action.chunk].cost

    def _ends_s(self, stage: int, cost: PassCost) -> tuple[float, float]:
        """Entry and exit, where the stage has them."""
        entry_s = cost.entry_s if stage == 0 else 0.0
        exit_s = cost.exit_s if stage == self.cluster.pp - 1 else 0.0
        return entry_s / self.cluster.speed, exit_s / self.cluster.speed

    def _pass_s(self, stage: int, action: StageAction) -> float:
        cost = self._cost(action)
        if action.direction == "backward":
            return self.layers[stage] * cost.backward_s / self.cluster.speed
        return self.layers[stage] * cost.forward_s / self.cluster.speed + sum(self._ends_s(stage, cost))

    def _step_s(self, stage: int, action: StageAction) -> float:
        return self.tasks[action.htask].step_s / self.cluster.speed * (self.layers[stage] / sum(self.layers))

    def _chain(self, stage: int, action: StageAction) -> Chain:
        key = (action.direction, stage, action.htask, action.chunk)
        if key not in self.chains:
            cost, layers, speed = self._cost(action), self.layers[stage], self.cluster.speed
            collective_s = self.cluster.all_reduce_s(cost.rows * self.row_bytes)
            if action.direction == "backward":
                self.chains[key] = backward_chain(layers, cost.backward_s / speed, collective_s)
            else:
                entry_s, exit_s = self._ends_s(stage, cost)
                layer_s = cost.forward_s / speed
                self.chains[key] = forward_chain(layers, layer_s, collective_s, entry_s=entry_s, exit_s=exit_s)
        return self.chains[key]
