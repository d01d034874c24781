"""The race of policies and what is said of planning: that the figures are of what they name."""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from benchmarks import planning, policies
from benchmarks.choices import Choice, Choices, choices
from benchmarks.made_up import partitions
from benchmarks.planning import planning_costs
from benchmarks.policies import KINDS, POLICIES, load_of_kind, median_interval, policy_race
from benchmarks.prediction import Outcome, Report
from benchmarks.report import show_choices, show_planning, show_policies, show_prediction
from tests.engine.build import backbone_of
from tests.plan.tables import table
from tests.tiny import tiny_model
from tests.tiny_tokenizer import VOCAB


def test_all_sides_run_the_same_steps_and_are_held_against_muxtune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "NON_UNIFORM", ("sst2", "openbookqa"))  # RTE is longer than the tiny positions
    race = policy_race("light non-uniform", 4, backbone_of(), None, table, rounds=3)
    by_name = {side.side: side for side in race.sides}
    assert list(by_name) == [*POLICIES, policies.ONE_BATCH]
    assert by_name["muxtune"].slower == 1.0 and by_name["muxtune"].interval == (1.0, 1.0)
    assert by_name["padded"].ineffective > by_name["fuse-all"].ineffective
    for side in race.sides:
        assert side.interval[0] <= side.slower <= side.interval[1]
        assert side.tokens_per_s > 0
    assert race.htasks >= 1 and race.planned_s > 0 and race.roofline is None
    console = Console(record=True, width=140)
    show_policies(console, race)
    told = console.export_text()
    assert all(name in told for name in by_name)


def test_the_roofline_of_a_load_is_that_of_muxtunes_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "NON_UNIFORM", ("sst2", "openbookqa"))
    backbone, model = backbone_of(), tiny_model("llama")
    race = policy_race("light non-uniform", 3, backbone, model, lambda: table(4096), rounds=2)
    assert {policies.FLOOR, policies.PEFT} < {side.side for side in race.sides}
    assert race.roofline is not None and 0 < race.roofline < 1
    console = Console(record=True, width=140)
    show_policies(console, race)
    assert f"share of the roofline: {race.roofline:.0%}" in console.export_text()


@pytest.mark.parametrize("kind", KINDS)
def test_loads_have_as_many_tasks_as_are_asked_for(kind: str) -> None:
    load = load_of_kind(kind, 16, 2, vocab=VOCAB)
    assert len(load.tasks) == 16 and load.steps == 2
    assert {len(batch) for task in load.tasks for batch in task} == {1 if kind.startswith("light") else 4}
    lengths = {len(sequence) for task in load.tasks for batch in task for sequence in batch}
    assert (len(lengths) == 1) == (kind == "light uniform")


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    drawn = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([drawn.random() for _ in range(11)])
        hits += low <= 0.5 <= high
    assert hits / 2000 > 0.95
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    few = [float(value) for value in range(25)]
    low, high = median_interval(few)
    assert 0 < low < statistics.median(few) < high < 24


def test_every_partition_is_among_all() -> None:
    drawn = planning._loads(np.random.default_rng(1), 5)
    found = [frozenset(frozenset(one.name for one in part) for part in whole) for whole in partitions(drawn)]
    assert len(found) == len(set(found)) == 52


def test_what_planning_gives_up_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "DRAWN", 3)
    monkeypatch.setattr(planning, "MOST_TASKS", 5)
    monkeypatch.setattr(planning, "REPEATS", 1)
    costs = planning_costs()
    assert len(costs.gaps) == 18 and min(costs.gaps) > -1e-9 and 0 <= costs.exact <= 1
    console = Console(record=True, width=140)
    show_planning(console, costs)
    assert "1000 tasks, 4 stages" in console.export_text()


def test_regret_is_over_the_best_measured() -> None:
    predicted = {"muxtune": 1.0, "sequential": 2.0}
    right = Choice(0, 2, predicted, {"muxtune": (3.0, 3.1), "sequential": (4.0, 4.1)})
    wrong = Choice(1, 2, predicted, {"muxtune": (4.4, 44.0, 4.8), "sequential": (4.0, 40.0, 4.0)})
    assert (right.chosen, right.best, right.regret) == ("muxtune", "muxtune", 0.0)
    assert wrong.best == "sequential" and wrong.regret == pytest.approx(0.1), "paired: a slow round counts no more"
    assert Choices((right, wrong)).within == 0.5


def test_mixes_run_under_every_policy() -> None:
    found = choices(backbone_of(), table(), mixes=2, seed=3, rounds=1, clock=time.perf_counter)
    assert len(found.choices) == 2
    for one in found.choices:
        assert one.tasks > 1 and one.predicted_s.keys() == one.measured_s.keys()
        assert sorted(policy for alike in one.measured_s for policy in alike.split(" = ")) == sorted(POLICIES)
        assert all(len(seconds) == 1 and min(seconds) > 0 for seconds in one.measured_s.values())
    numbers = [one.number for one in found.choices]
    assert all(first < then for first, then in pairwise(numbers))
    console = Console(record=True, width=160)
    outcome = Outcome(0, "lora 5", "fuse-all", 1, 16, 1.1, 1.0, 0.1)
    show_prediction(console, Report((outcome,)))
    show_choices(console, found)
    told = console.export_text()
    assert "median 10.0%" in told and "of 2 mixes" in told
