"""The benchmark of growth: that its figures are of what they name, and that what misses a target is said."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import bench, growth, overhead
from benchmarks.growth import AttachCost, GrowthCosts, TaskCost, TaskMemory, TokenCost, tasks_alone
from benchmarks.made_up import table
from benchmarks.memory import Memory
from benchmarks.overhead import Overhead
from benchmarks.report import show_growth
from benchmarks.sections import timed, work_of
from benchmarks.steady import STEPS, Steady, steady, train
from muxtune.engine.optim import FlatAdamW
from tests.engine.build import backbone_of

GOOD = GrowthCosts(
    tokens=(TokenCost(512, 1.0, 1.01), TokenCost(1024, 2.1, 2.0)),
    tasks=(TaskCost(1, 2.0, 1.0), TaskCost(32, 2.2, 1.1)),
    attach=(AttachCost(1, 1, 0.02),),
    overheads=(Overhead("light", 0.1, 0.01, 0.005, 0.01),),
    memory=(TaskMemory(1, Memory(1, 1000, 1100)), TaskMemory(9, Memory(1, 1960, 2100))),
    state_bytes=100,
    steady=Steady(100, (50, 51, 50, 51)),
)


def test_derived_figures_are_of_the_measured_ones() -> None:
    assert GOOD.nonlinear == pytest.approx(0.05)
    assert GOOD.added == pytest.approx(1.2)
    assert GOOD.overheads[0].together == pytest.approx(0.025)
    assert GOOD.missed == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": (TokenCost(512, 1.2, 1.0),)}, "not linear"),
        ({"tasks": (TaskCost(1, 2.0, 1.0), TaskCost(32, 2.2, 1.16))}, "not flat"),
        ({"attach": (AttachCost(1, 1, 0.01), AttachCost(32, 1, 0.06))}, "attaching"),
        ({"overheads": (Overhead("light", 0.1, 0.01, 0.01, 0.02),)}, "overhead above 3%"),
        ({"state_bytes": 60}, "1.5 times its state"),
        ({"steady": Steady(100, (0, 500_000, 1_000_000, 1_500_000))}, "grows with steps"),
    ],
)
def test_a_target_that_is_missed_is_said(change: dict[str, object], told: str) -> None:
    costs = replace(GOOD, **change)
    (missed,) = costs.missed
    assert told in missed
    console = Console(record=True, width=160)
    show_growth(console, costs)
    assert f"MISSED: {missed}" in console.export_text()


def test_a_round_is_measured_by_its_tokens_and_by_its_tasks() -> None:
    backbone = backbone_of()
    tokens = growth.by_tokens(backbone, 2, (128, 256))
    assert [one.tokens for one in tokens] == [128, 256]
    assert all(one.line_s == pytest.approx(one.step_s) for one in tokens), "a line through two points"
    tasks = growth.by_tasks(backbone, table, 2, (1, 4))
    assert [one.tasks for one in tasks] == [1, 4] and tasks[0].times_one == 1.0
    assert all(one.step_s > 0 for one in tasks)


def test_the_tokens_of_a_round_are_the_same_for_every_number_of_tasks() -> None:
    backbone, examples = backbone_of(), growth.SHARED_TOKENS // growth.SHARED_EXAMPLE_TOKENS
    for tasks in growth.TASKS:
        side = growth._side(backbone, 1, tasks, growth.SHARED_EXAMPLE_TOKENS, examples // tasks, table)
        rows = [sum(ref.length for chunk in task.participant().chunks for ref in chunk) for task in side.tasks]
        assert len(rows) == tasks and sum(rows) == growth.SHARED_TOKENS - examples, "the last of each is no input"


def test_attaching_is_timed_by_what_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "DATA_SET", 7)
    found = list(growth.attaching(backbone_of(), (1, 3)))
    assert [(one.attached, one.examples) for one in found] == [(1, 1), (3, 1), (4, 7)]
    assert all(0 < one.attach_s < 10 for one in found)


def test_shares_of_a_step_are_those_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "LOADS", {"light": overhead.light})
    backbone = backbone_of()
    (found,) = overhead.overheads(backbone, table, rounds=3)
    assert found.load == "light" and found.step_s > 0
    assert 0 < found.planning < 1 and 0 < found.data < 1 and 0 < found.bookkeeping < 1 and found.together < 1


def test_what_is_timed_is_put_back() -> None:
    backbone, step, backward = backbone_of(), FlatAdamW.step, torch.autograd.backward
    with timed({"work": work_of(backbone), "sleep": ((time, "sleep"),)}) as inside:
        assert FlatAdamW.step is not step and "hidden" in vars(backbone)
        time.sleep(0.01)
    assert FlatAdamW.step is step and torch.autograd.backward is backward and "hidden" not in vars(backbone)
    assert inside["work"] == 0 and inside["sleep"] >= 0.01


def test_our_contender_steps_every_task_by_itself(tiny_llama: Path) -> None:
    side = tasks_alone(tiny_llama, 3)
    assert [task.step for task in side.tasks] == [1, 1, 1] and side.engine.policy == "sequential"


def test_memory_is_looked_at_over_all_steps_but_the_first() -> None:
    found = train(40)
    assert found.steps == 40 and len(found.rss_bytes) == 31 and min(found.rss_bytes) > 0
    assert not Steady(8, (0, 0, 0, 9 * 2**20)).flat and Steady(8, (9, 9, 10, 9)).growth_bytes == 0


def test_bench_writes_growth(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "growth_costs", lambda backbone, folder, table, **settings: GOOD)
    monkeypatch.setattr(bench, "measure", lambda backbone: table())
    out = tmp_path / "growth.json"
    assert bench.main(["--part", "growth", "--model", str(tiny_llama), "--out", str(out)]) == 0
    found = json.loads(out.read_text())["growth"]
    assert found["nonlinear"] == pytest.approx(0.05) and found["added"] == pytest.approx(1.2) and found["missed"] == []
    assert found["steady"]["rss_bytes"] == [50, 51, 50, 51] and found["overheads"][0]["load"] == "light"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_thousand_steps_are_flat_in_memory() -> None:
    found = steady(STEPS)
    assert found.steps == STEPS == 20_000
    assert found.flat, found
