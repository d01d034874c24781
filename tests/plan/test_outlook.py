"""Plans on clusters: the simulator's word, memory of each device, and who is done when."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from muxtune.errors import ConfigError
from muxtune.plan.cost import CostModel
from muxtune.plan.memory import MemoryModel
from muxtune.plan.outlook import Outlooks, cost_on
from muxtune.plan.planner import make_plan
from muxtune.plan.profile import Curve, Directions
from muxtune.spec.cluster import ClusterSpec, Link
from muxtune.spec.policy import POLICIES
from tests.plan.tables import load, loads, table

LINK = Link(bandwidth=10**9, latency_s=1e-5)
ONE = ClusterSpec()
TWO = ClusterSpec(devices=2, pp=2, pp_link=LINK)
MEMORY = MemoryModel(base_bytes=1000, head_bytes=10, row_bytes=7)


def _sharded(knee: int = 256) -> object:
    whole = table(knee)
    curve = whole.layer[1].forward
    half = Curve(curve.counts, tuple(seconds / 2 for seconds in curve.seconds))
    return replace(whole, layer={**whole.layer, 2: Directions(half, half)})


@given(loads(), st.sampled_from(POLICIES))
def test_on_one_device_the_outlook_is_the_plan(tasks, policy):
    cost = CostModel(table(entry_s=1e-4))
    found = Outlooks(tasks, cost, MEMORY, ONE).of(policy)
    plan = make_plan(tasks, cost, MEMORY, policy)
    assert found.plan.htasks == plan.htasks and found.plan.peak_bytes == plan.peak_bytes
    assert found.iteration_s == pytest.approx(plan.iteration_s)
    assert found.done_s.keys() == {task.name for task in tasks}


@settings(max_examples=25)
@given(loads(most=5), st.sampled_from([32, 4096]))
def test_muxtune_is_never_behind_the_packed_policies(tasks, knee):
    outlooks = Outlooks(tasks, CostModel(table(knee)), MEMORY, TWO)
    best = outlooks.of("muxtune").iteration_s
    for rival in ("sequential", "fuse-all"):
        assert best <= outlooks.of(rival).iteration_s * (1 + 1e-9)


@settings(max_examples=15)
@given(loads(most=4))
def test_buckets_are_chosen_where_collectives_can_hide(tasks):
    cluster = ClusterSpec(devices=2, tp=2, tp_link=LINK)
    device = _sharded()
    outlooks = Outlooks(tasks, cost_on(device, cluster), MEMORY, cluster)
    found = outlooks.of("muxtune")
    assert sorted(place for bucket in found.plan.buckets for place in bucket) == list(range(len(found.plan.htasks)))
    assert found.iteration_s <= outlooks.of("sequential").iteration_s * (1 + 1e-9)


def test_each_device_keeps_to_its_memory():
    tasks = [load(f"task-{place}", 100) for place in range(4)]
    cost = CostModel(table(4096))
    roomy = Outlooks(tasks, cost, MEMORY, TWO).of("fuse-all")
    needed = max(roomy.timeline.peak_bytes)
    tight = replace(MEMORY, cap_bytes=needed - 1)
    found = Outlooks(tasks, cost, tight, TWO).of("fuse-all")
    assert max(found.timeline.peak_bytes) < needed and len(found.plan.htasks) > len(roomy.plan.htasks)
    with pytest.raises(ConfigError, match="even with one task a pass"):
        Outlooks(tasks, cost, replace(MEMORY, cap_bytes=10), TWO).of("muxtune")


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_is_too_small_is_said_whatever_the_tasks_sizes(policy):
    """Ten small tasks in one pass are as wide as the large one alone: narrower passes end at one task each."""
    tasks = [load("large", 100), *(load(f"small-{place}", 10) for place in range(10))]
    cost = CostModel(table(4096))
    with pytest.raises(ConfigError, match="even with one task a pass"):
        Outlooks(tasks, cost, replace(MEMORY, cap_bytes=10), TWO).of(policy)


def test_of_what_fits_the_fastest_is_taken():
    """Fused passes are the fastest here, and too large for one device; one task a pass is not."""
    tasks = [load("large", 100), *(load(f"small-{place}", 10) for place in range(10))]
    cost = CostModel(table(4096))
    alone = Outlooks(tasks, cost, MEMORY, TWO).of("sequential")
    tight = replace(MEMORY, cap_bytes=max(alone.timeline.peak_bytes))
    for policy in POLICIES:
        found = Outlooks(tasks, cost, tight, TWO).of(policy)
        assert found.plan.peak_bytes <= max(alone.timeline.peak_bytes)
        assert found.iteration_s <= alone.iteration_s * (1 + 1e-9)


def test_who_has_fewer_steps_is_done_first_and_the_others_go_on_faster():
    tasks = [load("short", 512, steps=2), load("long", 512, steps=10)]
    cost = CostModel(table(16))
    found = Outlooks(tasks, cost, MEMORY, ONE).of("muxtune")
    alone = Outlooks(tasks[1:], cost, MEMORY, ONE).of("muxtune")
    assert found.done_s["short"] < found.done_s["long"]
    assert found.done_s["long"] == pytest.approx(2 * found.iteration_s + 8 * alone.iteration_s, rel=0.05)


def test_what_is_said_of_htasks_is_for_the_speed_of_the_cluster():
    tasks = [load(f"task-{place}", 512) for place in range(3)]
    faster = ClusterSpec(speed=4)
    plain, found = (Outlooks(tasks, cost_on(table(16), one), MEMORY, one).of("sequential") for one in (ONE, faster))
    assert found.iteration_s == pytest.approx(plain.iteration_s / 4)
    assert sum(htask.predicted_s for htask in found.plan.htasks) == pytest.approx(found.iteration_s)
    assert max(found.done_s.values()) == pytest.approx(max(plain.done_s.values()) / 4)


def test_a_degree_without_measurements_is_refused():
    cluster = ClusterSpec(devices=2, tp=2, tp_link=LINK)
    with pytest.raises(ConfigError, match="degree 2 was not measured"):
        cost_on(table(), cluster)
