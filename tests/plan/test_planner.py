"""Plans: what they predict, why they end hTasks where they do, and the baselines beside them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from muxtune.plan.cost import CostModel
from muxtune.plan.loads import passes
from muxtune.plan.memory import MemoryModel
from muxtune.plan.planner import ineffective, make_plan, reasons, rows_of
from muxtune.plan.types import Plan
from muxtune.spec.policy import POLICIES
from tests.plan.tables import load, loads, table

ALL = st.sampled_from(POLICIES)
MEMORY = MemoryModel(base_bytes=100, head_bytes=10, row_bytes=7)


@given(loads(), ALL)
def test_every_chunk_of_every_task_is_in_one_pass(tasks, policy):
    plan = make_plan(tasks, CostModel(table()), MEMORY, policy)
    assert sorted(name for htask in plan.htasks for name in htask.tasks) == sorted(task.name for task in tasks)
    by_name = {task.name: task for task in tasks}
    ran = [member for htask in plan.htasks for one in passes([by_name[name] for name in htask.tasks]) for member in one]
    for task in tasks:
        assert [chunk for owner, chunk in ran if owner == task] == list(task.chunks)
    assert sorted(place for bucket in plan.buckets for place in bucket) == list(range(len(plan.htasks)))


@given(loads())
def test_a_pass_trains_or_does_not(tasks):
    for one in passes(tasks):
        assert len({chunk.trains for _, chunk in one}) == 1


@given(loads(), st.sampled_from([32, 256, 4096]))
def test_no_policy_is_predicted_to_be_faster(tasks, knee):
    """In the sorted order they are all among the partitions that fusion weighs, but for padding, which only costs."""
    cost = CostModel(table(knee, entry_s=1e-4))
    tasks = sorted(tasks, key=lambda task: (len(task.chunks), task.tokens, task.name))
    best = make_plan(tasks, cost, MEMORY, most_rows=5000).iteration_s
    for policy in POLICIES:
        rival = make_plan(tasks, cost, MEMORY, policy, most_rows=5000)
        assert best <= rival.iteration_s + 1e-6 * len(best_names(rival))


def best_names(plan: Plan) -> list[str]:
    return [name for htask in plan.htasks for name in htask.tasks]


@given(loads(), ALL)
def test_the_cap_holds(tasks, policy):
    free = MemoryModel(base_bytes=100, head_bytes=10, row_bytes=7)
    alone = max(free.pass_bytes(rows_of(policy)([task]), task.longest) for task in tasks)
    cap = free.held_bytes(tasks) + 2 * alone
    capped = MemoryModel(base_bytes=100, head_bytes=10, row_bytes=7, cap_bytes=cap)
    plan = make_plan(tasks, CostModel(table()), capped, policy)
    assert plan.peak_bytes <= cap == plan.cap_bytes


def test_padding_is_predicted():
    tasks = [load("short", 16), load("long", 160)]
    cost = CostModel(table(16))
    packed, padded = (make_plan(tasks, cost, MEMORY, policy) for policy in ("fuse-all", "padded"))
    assert (packed.htasks[0].rows, padded.htasks[0].rows) == (176, 320)
    assert padded.iteration_s > 1.5 * packed.iteration_s
    assert padded.peak_bytes - packed.peak_bytes == (320 - 176) * MEMORY.row_bytes
    assert ineffective(packed, tasks, cost) == 0
    assert ineffective(padded, tasks, cost) == pytest.approx(1 - 176 / 320)


def test_says_what_fusing_one_more_would_cost():
    tasks = [load("a", 64), load("b", 64), load("c", 64)]
    cost = CostModel(table(64))
    plan = make_plan(tasks, cost, MEMORY, "sequential")
    first, second, last = reasons(plan, tasks, cost, MEMORY)
    assert first.more_s == pytest.approx(0, abs=1e-9) and first.fits  # the device is full with one
    assert first.more_bytes == MEMORY.peak_bytes(tasks, [tasks[:2]])
    assert last.more_s is None
    roomy = reasons(plan, tasks, CostModel(table(4096)), MEMORY)
    assert roomy[0].more_s is not None and roomy[0].more_s < 0
    tight = MemoryModel(base_bytes=100, head_bytes=10, row_bytes=7, cap_bytes=100 + 10 + 7 * 100)
    assert not any(one.fits for one in reasons(plan, tasks, cost, tight)[:2])
    assert second.alone_s == second.fused_s
    assert reasons(plan, tasks, cost, tight)[0].short_bytes == 7 * 28
    rows = reasons(plan, tasks, cost, MEMORY, most_rows=100)[0]
    assert (rows.fits, rows.short_bytes, rows.more_rows, rows.most_rows) == (False, 0, 128, 100)
