"""Fusion against brute force, through the shipped code path."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.made_up import partitions
from muxtune.errors import ConfigError
from muxtune.plan.cost import CostModel
from muxtune.plan.fusion import fuse_optimally, in_order
from muxtune.plan.loads import TaskLoad
from muxtune.plan.memory import MemoryModel
from tests.plan.partitions import feasible, neighbours, value_s
from tests.plan.tables import load, loads, table

KNEES = st.sampled_from([32, 256, 4096])
STAGES = st.integers(1, 4)


def _names(htasks: tuple[tuple[TaskLoad, ...], ...]) -> list[set[str]]:
    return [{task.name for task in htask} for htask in htasks]


@given(loads(), KNEES, STAGES, st.integers(0, 3))
def test_equals_the_best_of_all_runs_of_neighbours(tasks, knee, stages, tightness):
    cost = CostModel(table(knee, entry_s=1e-4))
    memory = _capped(tasks, tightness)
    possible = [one for one in neighbours(in_order(tasks)) if feasible(one, memory, tasks)]
    if not possible:
        with pytest.raises(ConfigError, match="rows"):
            fuse_optimally(tasks, cost, memory, stages=stages)
        return
    found = fuse_optimally(tasks, cost, memory, stages=stages)
    least = min(value_s(one, cost, stages) for one in possible)
    assert feasible(found.htasks, memory, tasks)
    assert found.value_s == pytest.approx(least, rel=1e-9)
    assert value_s(found.htasks, cost, stages) == pytest.approx(found.value_s, rel=1e-9)


def _capped(tasks: list[TaskLoad], tightness: int) -> MemoryModel:
    """From no limit at all down to less than the largest task needs."""
    if not tightness:
        return MemoryModel(head_bytes=10, row_bytes=7, score_bytes=1)
    free = MemoryModel(base_bytes=5, head_bytes=10, row_bytes=7, score_bytes=1)
    alone = max(free.pass_bytes(task.peak_rows, task.longest) for task in tasks)
    cap = free.held_bytes(tasks) + int(alone * {1: 2.5, 2: 1.0, 3: 0.9}[tightness])
    return MemoryModel(base_bytes=5, head_bytes=10, row_bytes=7, score_bytes=1, cap_bytes=cap)


@given(loads(), KNEES, STAGES, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_count(tasks, knee, stages, random):
    cost = CostModel(table(knee))
    shuffled = random.sample(tasks, len(tasks))
    assert fuse_optimally(tasks, cost, MemoryModel(), stages=stages) == fuse_optimally(
        shuffled, cost, MemoryModel(), stages=stages
    )


@pytest.mark.parametrize(("knee", "sizes"), [(32, [1] * 8), (256, [4, 4]), (4096, [8])])
def test_fuses_up_to_the_knee(knee, sizes):
    """Tasks of 64 rows; below 32 rows a device is not full, at 256 four of them fill it, at 4,096 all do not."""
    tasks = [load(f"task-{place}", 64) for place in range(8)]
    device = table(knee)
    found = fuse_optimally(tasks, CostModel(device), MemoryModel(), most_rows=max(knee, 64))
    assert [len(htask) for htask in found.htasks] == sizes


def test_does_not_fuse_where_that_costs_stages_their_time():
    """On a full device fusing saves nothing, and on a pipeline it lengthens the bubble."""
    tasks = [load(f"task-{place}", 512) for place in range(4)]
    cost = CostModel(table(32))
    assert len(fuse_optimally(tasks, cost, MemoryModel(), stages=4).htasks) == 4


def test_of_equals_takes_the_fewest_htasks():
    tasks = [load(f"task-{place}", 4096) for place in range(5)]
    cost = CostModel(table(16, full_s=0.0))
    assert len(fuse_optimally(tasks, cost, MemoryModel()).htasks) == 1


def test_keeps_within_rows_and_bytes():
    tasks = [load(f"task-{place}", 100) for place in range(6)]
    cost = CostModel(table(4096))
    assert [len(one) for one in fuse_optimally(tasks, cost, MemoryModel(), most_rows=200).htasks] == [2, 2, 2]
    memory = MemoryModel(row_bytes=10, cap_bytes=3000)
    assert [len(one) for one in fuse_optimally(tasks, cost, memory).htasks] == [3, 3]


def test_a_paused_tasks_memory_is_not_free():
    tasks = [load(f"task-{place}", 100, state_bytes=0) for place in range(2)]
    paused = load("paused", 100, state_bytes=1500)
    memory = MemoryModel(row_bytes=10, cap_bytes=3000)
    cost = CostModel(table(4096))
    assert len(fuse_optimally(tasks, cost, memory).htasks) == 1
    assert len(fuse_optimally(tasks, cost, memory, also_held=[paused]).htasks) == 2


def test_refuses_what_fits_nowhere_with_the_numbers():
    memory = MemoryModel(row_bytes=10, cap_bytes=3000)
    with pytest.raises(ConfigError, match=r"large.*10 kB for a pass of 1000 rows, and 3 kB are left"):
        fuse_optimally([load("small", 10), load("large", 1000)], CostModel(table()), memory)
    with pytest.raises(ConfigError, match=r"large.*1000 rows; a pass may have 512"):
        fuse_optimally([load("large", 1000)], CostModel(table()), MemoryModel(), most_rows=512)


@given(loads(most=5), KNEES)
def test_the_best_of_all_partitions_is_not_far(tasks, knee):
    """What the fixed order gives up, at most, on drawn loads; the benchmark reports how much."""
    cost = CostModel(table(knee))
    least = min(value_s(one, cost) for one in partitions(tasks))
    assert least <= fuse_optimally(tasks, cost, MemoryModel()).value_s * (1 + 1e-9)


@pytest.mark.parametrize(("tasks", "limit_s"), [(64, 0.05), (1000, 2.0)])
@pytest.mark.parametrize("stages", [1, 4])
def test_is_planned_in_time(tasks, limit_s, stages):
    drawn = [load(f"task-{place}", *([17 + 37 * place % 400] * (1 + place % 3))) for place in range(tasks)]
    cost = CostModel(table(256, entry_s=1e-4))
    times = []
    for _ in range(3):
        began = time.process_time()
        fuse_optimally(drawn, cost, MemoryModel(), stages=stages)
        times.append(time.process_time() - began)
    assert min(times) < limit_s
