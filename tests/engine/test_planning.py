"""The engine under plans: renewed when who runs changes, and never felt by a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from muxtune.engine.engine import Engine
from muxtune.engine.load import load_backbone
from muxtune.engine.loads import load_of_task
from muxtune.engine.planning import Planning, memory_model
from muxtune.engine.runner import Runner
from muxtune.engine.sampling import Request, generate
from muxtune.engine.task import Sequences, Task
from muxtune.models import attention
from muxtune.models.memory import footprint
from muxtune.models.sources import resolve
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable
from muxtune.plan.types import HTask, MicroBatch, Plan, RoundRecord
from tests.engine.build import Trial, assert_same_bits, attach, backbone_of, mixed_trials, outcome, run, train
from tests.peak import peak_bytes
from tests.plan.tables import table
from tests.sequences import random_sequences

BACKBONE = backbone_of("llama")
NAMES = [trial.name for trial in mixed_trials("llama")]


def _planning(knee: int = 4096, **memory: int) -> Planning:
    return Planning(lambda: table(knee), MemoryModel(**memory), BACKBONE.places, refine=False)


class Drawn(Planning):
    """Another plan each round, whatever the tasks."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        super().__init__(table, MemoryModel(), BACKBONE.places)
        self._plans = list(plans)
        self._rounds = 0

    def renew(self, running: Sequence[Task], held: Sequence[Task], most_rows: int, keep_tokens: int = 0) -> Plan | None:
        self.plan = self._plans[self._rounds % len(self._plans)]
        self._rounds += 1
        return self.plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Those tasks in any order, in any hTasks; some may be in none."""
    order = draw(st.permutations(NAMES))
    marks = [draw(st.sampled_from(["begin", "join", "none"])) for _ in order]
    htasks: list[list[str]] = []
    for name, mark in zip(order, marks, strict=True):
        if mark == "begin" or (mark == "join" and not htasks):
            htasks.append([name])
        elif mark == "join":
            htasks[-1].append(name)
    return Plan("muxtune", tuple(HTask(tuple(one), 1, 1, 1.0) for one in htasks), (), 1, 1.0, 0)


ALONE = {trial.name: train(BACKBONE, (trial,))[trial.name] for trial in mixed_trials("llama")}


@settings(max_examples=20)
@given(st.lists(plans(), min_size=1, max_size=4), st.sampled_from([1, 60, 2048]))
def test_any_plans_give_every_task_the_bits_it_has_alone(drawn: list[Plan], fuse_tokens: int) -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=Drawn(drawn), fuse_tokens=fuse_tokens)
    tasks = [attach(engine, trial) for trial in mixed_trials("llama")]
    steps = run(engine)
    for task in tasks:
        assert_same_bits(outcome(task, steps[task.name]), ALONE[task.name])


def test_plans_are_renewed_when_who_runs_changes_and_only_then() -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=_planning())
    tasks = [attach(engine, trial) for trial in mixed_trials("llama")]
    told: list[RoundRecord | Plan] = []
    list(Runner(engine, trace=told.append).run())
    planned = [sorted(name for htask in one.htasks for name in htask.tasks) for one in told if isinstance(one, Plan)]
    # steps: all 3, drop 4, short 3, last 2; one task alone needs no plan
    assert planned == [sorted(NAMES), ["all", "drop", "short"]]
    rounds = [one for one in told if isinstance(one, RoundRecord)]
    assert isinstance(told[0], Plan) and len(rounds) == max(task.total_steps for task in tasks)


def test_predictions_that_are_far_off_are_corrected_and_planned_anew() -> None:
    """A table that says ten seconds a layer, of passes that take milliseconds."""
    planning = Planning(lambda: table(full_s=10.0), MemoryModel(), BACKBONE.places)
    engine = Engine(BACKBONE, policy="muxtune", planning=planning)
    for trial in mixed_trials("llama"):
        attach(engine, replace(trial, steps=12))
    told: list[RoundRecord | Plan] = []
    list(Runner(engine, trace=told.append).run())
    first, *_, last = [one for one in told if isinstance(one, Plan)]
    assert first.iteration_s > 40 and last.iteration_s < 4
    assert {name for htask in last.htasks for name in htask.tasks} == set(NAMES)


def test_a_round_runs_what_the_plan_says() -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=_planning(16))
    for trial in mixed_trials("llama"):
        attach(engine, trial)
    schedule = engine.schedule([task.participant() for task in engine.tasks.values()])
    plan = engine.plan
    assert plan is not None
    for action in schedule.actions:
        if isinstance(action, MicroBatch):
            assert {item.task for item in action.items} <= set(plan.htasks[action.htask].tasks)


def test_a_paused_task_is_out_of_the_plan_and_comes_back() -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=_planning())
    for trial in mixed_trials("llama"):
        attach(engine, trial)
    planned: list[set[str]] = []
    for event in Runner(engine).run():
        if event.task == "drop" and getattr(event, "step", 0) == 1 and not planned:
            engine.pause("drop")
            planned.append(_names(engine.plan))
        elif engine.tasks["drop"].status == "paused":
            planned.append(_names(engine.plan))
    assert "drop" in planned[0]
    assert all("drop" not in names for names in planned[-2:])


def _names(plan: Plan | None) -> set[str]:
    return {name for htask in plan.htasks for name in htask.tasks} if plan is not None else set()


def test_memory_that_is_too_small_for_two_keeps_them_apart_and_never_stops_one() -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=_planning(row_bytes=10, cap_bytes=1))
    for trial in mixed_trials("llama"):
        attach(engine, trial)
    schedule = engine.schedule([task.participant() for task in engine.tasks.values()])
    rows = [action.tokens for action in schedule.actions if isinstance(action, MicroBatch)]
    widest = max(load_of_task(task, BACKBONE.places).peak_rows for task in engine.tasks.values())
    assert max(rows) <= widest


@pytest.mark.parametrize("passes", [1.0, 1.5, 4.0])
def test_no_round_holds_more_than_its_plan_says(passes: float, tiny_llama: Path) -> None:
    """Measured while it runs; `passes` is the room that there is, in the largest pass of any task alone."""
    attention.register()
    model = footprint(tiny_llama, torch.float32)
    engine = Engine(load_backbone(resolve(str(tiny_llama)), device="cpu", dtype="fp32"), policy="muxtune")
    trials = [Trial(f"task-{place}", [24 + 16 * place] * 8, batch=4, r=2 + 4 * place) for place in range(5)]
    tasks = [engine.attach(trial.job, Sequences(trial.examples)) for trial in trials]
    loads = [load_of_task(task, engine.backbone.places) for task in tasks]
    free = memory_model(model, process_bytes=0, limit_bytes=None)
    alone = max(free.pass_bytes(load.peak_rows, load.longest) for load in loads)
    memory = replace(free, cap_bytes=free.held_bytes(loads) + int(passes * alone))
    engine.planning = Planning(lambda: table(4096), memory, engine.backbone.places, refine=False)

    def one_round() -> None:
        engine.execute(engine.schedule([task.participant() for task in tasks]))

    one_round()  # moments are made in the first
    held = peak_bytes(one_round)
    assert engine.plan is not None and engine.plan.peak_bytes <= memory.cap_bytes
    assert held <= engine.plan.peak_bytes - free.held_bytes(loads)
    assert (len(engine.plan.htasks) > 1) == (passes < 4)


def test_an_adapter_without_data_answers_and_is_driven_beside_a_plan() -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=Planning(table, MemoryModel(), BACKBONE.places))
    for trial in mixed_trials("llama"):
        attach(engine, trial)
    engine.execute(engine.schedule([task.participant() for task in engine.tasks.values()]))
    assert engine.plan is not None
    asked = attach(engine, replace(mixed_trials("llama")[0], name="asked"), ())
    (reply,) = generate(engine, [Request("asked", (1, 2, 3), frozenset(), max_new_tokens=4)])
    assert len(reply) == 4
    assert engine.forward_backward({asked: random_sequences([9, 12], seed=1)})["asked"].tokens > 0
    assert engine.optim_step(asked).error is None


def test_what_has_ended_holds_its_memory_until_it_is_detached() -> None:
    engine = Engine(BACKBONE, policy="muxtune", planning=_planning())
    tasks = [attach(engine, trial) for trial in mixed_trials("llama")]

    def peak_bytes() -> int:
        engine.schedule([task.participant() for task in engine.tasks.values() if task.runnable])
        assert engine.plan is not None
        return engine.plan.peak_bytes

    engine.cancel(tasks[0])
    held = peak_bytes()
    engine.detach(tasks[0])
    assert held - peak_bytes() == load_of_task(tasks[0], BACKBONE.places).state_bytes > 0


def test_nothing_is_measured_for_one_task() -> None:
    def never() -> OperatorTable:
        pytest.fail("asked for")

    engine = Engine(BACKBONE, policy="muxtune", planning=Planning(never, MemoryModel(), BACKBONE.places))
    attach(engine, mixed_trials("llama")[0])
    assert run(engine)["all"] and engine.plan is None
