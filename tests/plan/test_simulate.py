"""Simulated timelines: legal by properties, and equal to the closed forms there are."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.plan.cost import CostModel, PassCost
from muxtune.plan.grouping import group
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad
from muxtune.plan.memory import MemoryModel
from muxtune.plan.pipeline import StageAction
from muxtune.plan.planner import pass_costs
from muxtune.plan.profile import Curve, Directions, OperatorTable
from muxtune.plan.simulate import SimPass, SimTask, sim_task, simulate
from muxtune.plan.stages import Footprint
from muxtune.plan.timeline import Event, Resource, Timeline
from muxtune.spec import ClusterSpec, Link
from tests.plan.simulations import FREE, ROW_BYTES, Simulation, cluster, even, simulations

TINY = 1e-9
LAYERS = 3
Spans = dict[tuple[int, StageAction], tuple[float, float]]


def _wall(tasks: list[SimTask], made: ClusterSpec, *, layers: int, iterations: int = 1, bucket: bool = False) -> float:
    buckets = [tuple(range(len(tasks)))] if bucket else [(place,) for place in range(len(tasks))]
    return simulate(tasks, buckets, made, layers=layers, row_bytes=ROW_BYTES, iterations=iterations).wall_s


def _done(timeline: Timeline) -> Spans:
    """When each action of each stage starts, and when its last collective ends."""
    found: Spans = {}
    for event in timeline.events:
        if event.what != "send":
            key = (event.resource.stage, event.action)
            start, end = found.get(key, (event.start_s, event.end_s))
            found[key] = (min(start, event.start_s), max(end, event.end_s))
    return found


def _sends(timeline: Timeline) -> Spans:
    return {
        (event.resource.stage, event.action): (event.start_s, event.end_s)
        for event in timeline.events
        if event.what == "send"
    }


@given(simulations())
def test_no_resource_does_two_things_at_once(simulation: Simulation) -> None:
    by_resource: dict[Resource, list[Event]] = defaultdict(list)
    for event in simulation.run().events:
        assert 0 <= event.start_s <= event.end_s
        by_resource[event.resource].append(event)
    for events in by_resource.values():
        ordered = sorted(events, key=lambda event: (event.start_s, event.end_s))
        assert all(before.end_s <= after.start_s + TINY for before, after in pairwise(ordered))


@given(simulations())
def test_everything_runs_once_on_every_stage(simulation: Simulation) -> None:
    """In one event without tensor parallelism, in one a subgraph with it; each send once."""
    timeline = simulation.run()
    tp, stages = simulation.cluster.tp, simulation.cluster.pp
    computed = Counter(
        (event.resource.stage, event.action) for event in timeline.events if event.what not in ("comm", "send")
    )
    collectives = Counter((event.resource.stage, event.action) for event in timeline.events if event.what == "comm")
    expected: Counter[tuple[int, StageAction]] = Counter()
    reduced: Counter[tuple[int, StageAction]] = Counter()
    for stage, own in enumerate(timeline.layers):
        for iteration in range(simulation.iterations):
            for htask, task in enumerate(simulation.tasks):
                for chunk, one in enumerate(task.passes):
                    forward = (stage, StageAction("forward", htask, chunk, iteration))
                    leaves = stage == stages - 1 and one.trains
                    expected[forward] = 1 if tp == 1 else 2 * own + leaves
                    reduced[forward] = 2 * own if tp > 1 else 0
                    if one.trains:
                        backward = (stage, StageAction("backward", htask, chunk, iteration))
                        expected[backward] = 1 if tp == 1 else 2 * own
                        reduced[backward] = 2 * own if tp > 1 else 0
                expected[stage, StageAction("step", htask, len(task.passes) - 1, iteration)] = 1
    assert computed == expected and collectives == reduced
    sent = Counter(
        (event.resource.kind, event.resource.stage, event.action) for event in timeline.events if event.what == "send"
    )
    assert set(sent.values()) <= {1}
    passes = sum(1 + one.trains for task in simulation.tasks for one in task.passes) * simulation.iterations
    assert len(sent) == passes * (stages - 1)


@given(simulations())
def test_everything_comes_after_what_it_needs(simulation: Simulation) -> None:
    timeline = simulation.run()
    spans, sends = _done(timeline), _sends(timeline)
    last = simulation.cluster.pp - 1
    for (stage, action), (start, _) in spans.items():
        htask, chunk, iteration = action.htask, action.chunk, action.iteration
        if action.direction == "forward" and stage > 0:
            assert sends[stage - 1, action][0] + TINY >= spans[stage - 1, action][1]
            assert start + TINY >= sends[stage - 1, action][1]
        if action.direction == "backward" and stage < last:
            assert sends[stage + 1, action][0] + TINY >= spans[stage + 1, action][1]
            assert start + TINY >= sends[stage + 1, action][1]
        if action.direction == "backward":
            assert start + TINY >= spans[stage, StageAction("forward", htask, chunk, iteration)][1] * (stage == last)
        if action.direction == "step":
            latency = simulation.cluster.send_s(0)
            assert start + TINY >= spans[0, StageAction("backward", htask, chunk, iteration)][1] + stage * latency
        if action.direction == "forward" and chunk == 0 and iteration:
            steps = len(simulation.tasks[htask].passes) - 1
            assert start + TINY >= spans[stage, StageAction("step", htask, steps, iteration - 1)][1]
        assert timeline.wall_s >= start


@given(simulations())
def test_it_takes_no_less_than_its_bounds_and_no_more_than_all_work(simulation: Simulation) -> None:
    timeline = simulation.run()
    work: dict[Resource, float] = defaultdict(float)
    for event in timeline.events:
        work[event.resource] += event.end_s - event.start_s
    steps = simulation.iterations * len(simulation.tasks)
    waits = steps * sum(stage * simulation.cluster.send_s(0) for stage in range(simulation.cluster.pp))
    assert max(work.values()) <= timeline.wall_s * (1 + TINY)
    assert timeline.wall_s <= (sum(work.values()) + waits) * (1 + TINY)


@given(simulations())
def test_the_shares_of_time_add_up(simulation: Simulation) -> None:
    timeline = simulation.run()
    used = sum(timeline.utilisation) / timeline.stages
    assert all(0 < share <= 1 + TINY for share in timeline.utilisation)
    assert 0 <= timeline.bubble_share <= 1 and -TINY <= timeline.stall_share <= 1
    assert used + timeline.bubble_share + timeline.stall_share == pytest.approx(1)
    if simulation.cluster.tp == 1:
        assert timeline.stall_share == 0
    tokens = simulation.iterations * sum(task.tokens for task in simulation.tasks)
    assert timeline.tokens_per_s == pytest.approx(tokens / timeline.wall_s)


@given(simulations(), st.data())
def test_names_of_htasks_are_only_names(simulation: Simulation, data: st.DataObject) -> None:
    """The same buckets of the same hTasks under other numbers take the same time."""
    order = data.draw(st.permutations(range(len(simulation.tasks))))
    renamed = [tuple(order.index(place) for place in bucket) for bucket in simulation.buckets]
    other = simulation.run([simulation.tasks[place] for place in order], renamed)
    assert other.wall_s == pytest.approx(simulation.run().wall_s, rel=1e-12)


@given(simulations(max_stages=1, max_tp=1))
def test_one_device_takes_the_sum_of_its_passes_and_steps(simulation: Simulation) -> None:
    alone = sum(task.total_s(simulation.layers) for task in simulation.tasks)
    timeline = simulation.run()
    assert timeline.wall_s == pytest.approx(simulation.iterations * alone / simulation.cluster.speed, rel=1e-12)
    assert timeline.bubble_share == pytest.approx(0, abs=1e-9)
    assert {event.resource for event in timeline.events} == {Resource("compute", 0)}


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("passes", [1, 3, 8, 20])
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_the_bubble_of_1f1b(stages: int, passes: int, backward_s: float) -> None:
    """(S - 1) / (M + S - 1), with equal stages."""
    task = even(passes=passes, backward_s=backward_s)
    timeline = simulate([task], [(0,)], cluster(stages), layers=stages, row_bytes=ROW_BYTES)
    assert timeline.wall_s == pytest.approx((passes + stages - 1) * (1 + backward_s))
    assert timeline.bubble_share == pytest.approx((stages - 1) / (passes + stages - 1))


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("tasks", [1, 2, 3, 4, 5, 9])
def test_tasks_fill_each_others_bubbles_as_in_mlora(stages: int, tasks: int) -> None:
    """With one micro-batch a step, D stages and L tasks: a bubble of max((D - L) / D, 0) (LoRAPP, VLDB 2025)."""
    members = [even(name=str(number), backward_s=2.0) for number in range(tasks)]
    for bucket in (False, True):
        walls = [_wall(members, cluster(stages), layers=stages, iterations=n, bucket=bucket) for n in (7, 8)]
        busy = tasks * 3.0
        assert 1 - busy / (walls[1] - walls[0]) == pytest.approx(max((stages - tasks) / stages, 0))


def test_a_second_bucket_fills_the_gap_between_two_iterations() -> None:
    """One hTask runs its pipeline empty for each step; two of S - 1 passes or more never do."""
    stages = 4
    alone = [_wall([even(passes=6)], cluster(stages), layers=stages, iterations=n) for n in (4, 5)]
    assert alone[1] - alone[0] == pytest.approx(2 * (6 + stages - 1))
    both = [even(passes=3, name="a"), even(passes=3, name="b")]
    filled = [_wall(both, cluster(stages), layers=stages, iterations=n) for n in (4, 5)]
    assert filled[1] - filled[0] == pytest.approx(2 * 6)


@pytest.mark.parametrize("collective_s", [0.5, 1.0])
def test_two_equal_htasks_hide_their_collectives(collective_s: float) -> None:
    """All but the last of each way, if none is longer than the shorter half of a layer; one alone hides none."""
    layers, size = 6, 16 * ROW_BYTES
    made = cluster(1, 2, tp_link=Link(bandwidth=round(size / collective_s)))
    assert made.all_reduce_s(size) == collective_s
    task = even(forward_s=3.0, backward_s=3.0)
    alone = simulate([task], [(0,)], made, layers=layers, row_bytes=ROW_BYTES)
    assert alone.wall_s == pytest.approx(layers * (6 + 4 * collective_s))
    assert alone.stall_share == pytest.approx(4 * collective_s / (6 + 4 * collective_s))
    both = simulate([task, task], [(0, 1)], made, layers=layers, row_bytes=ROW_BYTES)
    assert 12 * layers + collective_s <= both.wall_s <= 12 * layers + 2 * collective_s + TINY
    apart = simulate([task, task], [(0,), (1,)], made, layers=layers, row_bytes=ROW_BYTES)
    assert apart.wall_s == pytest.approx(2 * alone.wall_s)


def test_a_faster_device_and_slower_links() -> None:
    tasks = [even(passes=4, entry_s=0.5, exit_s=2.0, step_s=1.0)]
    base = _wall(tasks, cluster(2), layers=4)
    assert _wall(tasks, cluster(2, speed=2), layers=4) == pytest.approx(base / 2)
    slow = Link(bandwidth=16 * ROW_BYTES, latency_s=0.25)
    # Each way the first message is waited for, and at least that.
    assert _wall(tasks, cluster(2, pp_link=slow), layers=4) >= base + 2 * 1.25


def test_a_step_waits_for_the_norm_of_all_stages() -> None:
    slow = Link(bandwidth=2**62, latency_s=0.5)
    timeline = simulate([even(step_s=6.0)], [(0,)], cluster(3, pp_link=slow), layers=3, row_bytes=ROW_BYTES)
    steps = {event.resource.stage: event for event in timeline.events if event.what == "step"}
    back = max(event.end_s for event in timeline.events if event.what == "backward")
    assert back == pytest.approx(6 + 4 * 0.5)
    assert [steps[stage].start_s for stage in range(3)] == pytest.approx([back, back + 0.5, back + 1.0])
    assert all(event.end_s - event.start_s == pytest.approx(2.0) for event in steps.values())
    assert timeline.stepped_s(0, 0) == timeline.wall_s == pytest.approx(back + 3)


def test_an_htask_of_loads_runs_its_members_chunks_pass_by_pass() -> None:
    curve = Curve((16.0, 64.0), (1.0, 4.0))
    both = Directions(curve, Curve((16.0,), (2.0,)))
    table = OperatorTable("m", "cpu", "fp32", 1, LAYERS, ROW_BYTES, curve, {1: both}, both, both, {}, curve)
    cost, memory = CostModel(table), MemoryModel(1000, 70, 2, 1, 6)
    carried = ChunkLoad((Span(16, 16),), 0, trains=False)
    whole, tail = ChunkLoad((Span(20, 20),), 20), ChunkLoad((Span(4, 20),), 4)
    cut = TaskLoad("cut", (carried, tail, whole), parameters=32, state_bytes=5, carried=16, steps=2)
    plain = TaskLoad("plain", (whole, whole), parameters=16, widest=40)
    steps_s = cost.step_s(cut) + cost.step_s(plain)
    task = sim_task([cut, plain], pass_costs([cut, plain], cost), steps_s, memory)
    assert (task.tasks, task.tokens) == (("cut", "plain"), 24 + 40)
    assert task.passes == (
        SimPass(cost.pass_cost([(cut, carried)]), trains=False),
        SimPass(cost.pass_cost([(cut, tail), (plain, whole)])),
        SimPass(cost.pass_cost([(cut, whole), (plain, whole)])),
    )
    assert task.footprint == Footprint(5 + 16 * 6, (20 + 40) * (2 + 20))
    made = simulate([task], [(0,)], ClusterSpec(), layers=LAYERS, row_bytes=ROW_BYTES, memory=memory)
    assert made.wall_s == pytest.approx(sum(one.cost.total_s(LAYERS) for one in task.passes) + task.step_s)
    assert made.peak_bytes == (memory.peak_bytes([cut, plain], [[cut, plain]]),)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pp: 4 stages, but the model has 3 layers \(at most 3\)"):
        simulate([even()], [(0,)], cluster(4), layers=3, row_bytes=1)


@pytest.mark.parametrize("tp", [1, 2])
def test_simulating_is_quick(tp: int) -> None:
    """64 hTasks of four passes on four stages."""
    costs = [PassCost(512, 1e-3, (1 + number % 7) * 1e-3, 2e-3, 5e-3) for number in range(64)]
    tasks = [SimTask((str(number),), (SimPass(cost),) * 4, 1e-3, 2048) for number, cost in enumerate(costs)]
    buckets = group([task.total_s(32) for task in tasks], 8)
    began = time.process_time()
    timeline = simulate(tasks, buckets, cluster(4, tp, tp_link=FREE), layers=32, row_bytes=8192)
    assert timeline.bubble_share < 0.5 and time.process_time() - began < 2
