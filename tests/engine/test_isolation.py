"""No path leads from one task to another: not its tokens, not its NaNs, not its coming and going.

reports.md 11 (co-scheduled with longer sequences), 13 (both of two interleaved tasks train), 15 (grouped-query shapes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Task
from muxtune.errors import ConfigError
from muxtune.models.backbone import Backbone
from muxtune.plan.types import StepOutcome
from muxtune.spec.event import StepResult, TaskEvent
from muxtune.spec.status import JobStatus
from tests.engine.build import (
    Trained,
    Trial,
    assert_same_bits,
    attach,
    backbone_of,
    by_task,
    mixed_trials,
    outcome,
    run,
    train,
)
from tests.sequences import random_sequences
from tests.tiny import SUPPORTED

VICTIM = Trial("victim", [5, 17, 9, 21], dropout=0.1, r=6, seed=1)
OTHER = Trial("other", [8, 30, 13, 4], r=8, dropout=0.2, seed=2)


def _round(engine: Engine, tasks: Iterable[Task]) -> dict[str, StepOutcome]:
    """One optimizer step of each; what the executor said of it."""
    record = engine.execute(engine.schedule([task.participant() for task in tasks]))
    return {action.step.task: action.step for action in record.actions if action.step is not None}


def _gradient_beside(backbone: Backbone, others: Sequence[TokenSequence], first: bool) -> torch.Tensor:
    """The victim's gradient on its own batch, in one pass with a batch of another task, before or after it."""
    engine = Engine(backbone)
    victim, other = attach(engine, VICTIM), attach(engine, OTHER)
    batches = {victim: VICTIM.examples, other: others}
    engine.forward_backward(batches if first else dict(reversed(batches.items())))
    assert other.adapter.parameters.gradient.any()
    return victim.adapter.parameters.gradient.clone()


@pytest.mark.parametrize("arch", SUPPORTED)
def test_another_tasks_tokens_never_change_a_bit_of_a_gradient(arch: str) -> None:
    backbone = backbone_of(arch)
    lengths = OTHER.lengths
    before = _gradient_beside(backbone, random_sequences(lengths, seed=2), True)
    changed = (
        random_sequences(lengths, seed=3),
        random_sequences(lengths[::-1], seed=3),
        random_sequences([4 * length for length in VICTIM.lengths], seed=3),
        random_sequences([2], seed=3),
    )
    for others in changed:
        for first in (True, False):
            assert torch.equal(_gradient_beside(backbone, others, first), before)


def _poison(task: Task, value: float, matrix: str = "lora_B") -> None:
    with torch.no_grad():
        for name, view in task.adapter.parameters.views.items():
            if name.endswith(matrix):
                view.fill_(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("arch", ["llama-mqa", "gemma2", "gpt2", "opt"])
def test_a_task_that_turns_non_finite_stops_alone_before_its_step(arch: str, value: float) -> None:
    backbone = backbone_of(arch)
    trials = mixed_trials(arch)
    alone = {trial.name: train(backbone, [trial])[trial.name] for trial in trials}
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in trials]
    bad = tasks[1]
    _poison(bad, value)
    kept = bad.adapter.parameters.values.clone()
    events = list(Runner(engine).run())
    failed = [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]
    assert [event.task for event in failed] == [bad.name]
    assert str(failed[0].data["code"]).startswith("non_finite")
    assert torch.equal(bad.adapter.parameters.values.nan_to_num(7), kept.nan_to_num(7)), "its last values are gone"
    assert bad.step == 0 and not bad.optimizer.moments() and not bad.adapter.parameters.gradient.any()
    for task in tasks:
        if task is not bad:
            steps = [event for event in events if isinstance(event, StepResult) and event.task == task.name]
            assert_same_bits(outcome(task, steps), alone[task.name])


def test_a_gradient_that_overflows_under_a_finite_loss_is_refused_too() -> None:
    engine = Engine(backbone_of())
    bad, good = attach(engine, replace(OTHER, targets=("o_proj",), dropout=0)), attach(engine, VICTIM)
    with torch.no_grad():
        for name, view in bad.adapter.parameters.views.items():
            view.fill_(1e30 if name.endswith("lora_A") else 0)
    steps = _round(engine, [bad, good])
    assert abs(steps["other"].loss) < 20 and steps["other"].grad_norm == float("inf")
    assert (steps["other"].error or "").startswith("non_finite_gradient")
    assert steps["victim"].error is None and bad.step == 0 and good.step == 1


def test_a_failure_is_of_one_step_and_leaves_nothing_behind() -> None:
    """The retry unit is the step: healed, the task goes on as if the bad attempt had never been."""
    backbone = backbone_of()
    engine = Engine(backbone)
    task = attach(engine, VICTIM)
    start = task.adapter.parameters.values.clone()
    _poison(task, float("nan"))
    assert _round(engine, [task])["victim"].error is not None
    with torch.no_grad():
        task.adapter.parameters.values.copy_(start)
    assert_same_bits(outcome(task, run(engine)["victim"]), train(backbone, [VICTIM])["victim"])


STEPS = 6
CAST = (
    Trial("one", [5, 17, 9, 21], steps=STEPS, dropout=0.1, r=6, seed=1),
    Trial("two", [8, 30, 13, 4], steps=STEPS, r=8, seed=2, chunk_tokens=30),
    Trial("three", [12, 3, 3], batch=2, steps=STEPS, r=3, targets=("q_proj", "down_proj"), seed=3),
)
Change = Callable[[Engine], object]
CHANGES: dict[str, dict[int, Change]] = {
    "nothing": {},
    "joins": {2: lambda engine: attach(engine, OTHER), 4: lambda engine: attach(engine, replace(OTHER, name="late"))},
    "leaves": {1: lambda engine: engine.detach("two")},
    "pauses": {1: lambda engine: engine.pause("two"), 3: lambda engine: engine.resume("two")},
    "cancelled": {3: lambda engine: engine.cancel("two")},
    "fails": {2: lambda engine: _poison(engine.task("two"), float("nan"))},
    "joins again": {2: lambda engine: engine.detach("two"), 3: lambda engine: attach(engine, CAST[1])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_coming_and_going_between_steps_changes_no_bit_of_the_others(change: str) -> None:
    backbone = backbone_of("qwen3")
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in CAST]
    weights = [parameter.data_ptr() for parameter in backbone.model.parameters()]
    blocks = list(backbone.blocks)
    steps: dict[str, list[StepResult]] = {}
    done = 0
    for event in Runner(engine).run():
        if not isinstance(event, StepResult):
            continue
        steps.setdefault(event.task, []).append(event)
        if event.task == "three":  # the last of each round
            done += 1
            CHANGES[change].get(done, lambda engine: None)(engine)
    assert done == STEPS
    for task, trial in zip(tasks, CAST, strict=True):
        if task.name != "two" or change in ("nothing", "joins", "pauses"):
            assert task.status is JobStatus.COMPLETED
            assert_same_bits(outcome(task, steps[task.name]), _alone(backbone, trial))
    if change == "joins again":
        assert steps["two"][2:] and [step.loss for step in steps["two"][2:]] == _alone(backbone, CAST[1]).losses
    assert [parameter.data_ptr() for parameter in backbone.model.parameters()] == weights, "the backbone moved"
    assert engine.backbone is backbone and backbone.blocks == blocks


def _alone(backbone: Backbone, trial: Trial) -> Trained:
    return train(backbone, [trial])[trial.name]


def test_a_paused_task_ends_as_if_it_had_never_paused_and_a_cancelled_one_keeps_its_values() -> None:
    backbone = backbone_of()
    engine = Engine(backbone)
    one, two = attach(engine, CAST[0]), attach(engine, CAST[1])
    losses = [_round(engine, [one, two])["two"].loss]
    engine.pause(two)
    for _ in range(2):
        _round(engine, [one])
    assert not two.runnable and two.step == 1
    engine.resume(two)
    while two.step < two.total_steps:
        losses.append(_round(engine, [task for task in (one, two) if task.step < task.total_steps])["two"].loss)
    expected = _alone(backbone, CAST[1])
    assert losses == expected.losses and torch.equal(two.adapter.parameters.values, expected.values)
    engine.cancel(one)
    assert torch.equal(engine.task("one").adapter.parameters.values, _alone(backbone, CAST[0]).values)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sequential"},
        {"policy": "padded"},
        {"policy": "fuse-all", "fuse_tokens": 40},
        {"policy": "fuse-all", "fuse_tokens": 1},
    ],
    ids=str,
)
def test_who_runs_with_whom_changes_no_bit(options: dict[str, object]) -> None:
    backbone = backbone_of("gemma3")
    trials = mixed_trials("gemma3")
    fused = train(backbone, trials)
    apart = train(backbone, trials, **options)
    reversed_order = train(backbone, trials[::-1])
    for trial in trials:
        assert_same_bits(fused[trial.name], apart[trial.name])
        assert_same_bits(fused[trial.name], reversed_order[trial.name])


@pytest.mark.parametrize("threads", [1, 2])
def test_whatever_the_number_of_threads_together_is_alone(threads: int) -> None:
    """The number is part of what decides the bits, and the same for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        backbone = backbone_of("llama")
        trials = mixed_trials("llama")
        together = train(backbone, trials)
        for trial in trials:
            assert_same_bits(together[trial.name], train(backbone, (trial,))[trial.name])
    finally:
        torch.set_num_threads(before)


def test_a_fairness_policy_that_picks_one_at_a_time_changes_no_bit() -> None:
    """In turns, the one that has done least first: every task ends as if all had run in every round."""
    backbone = backbone_of("llama")
    trials = mixed_trials("llama")
    expected = train(backbone, trials)
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in trials]
    rounds: list[list[str]] = []

    def least(able: Sequence[Task]) -> Sequence[Task]:
        picked = [min(able, key=lambda task: task.step)]
        rounds.append([task.name for task in picked])
        return picked

    steps = by_task(engine, list(Runner(engine, fair=least).run()))
    assert len(rounds) == sum(trial.steps for trial in trials) and len(set(map(tuple, rounds[: len(trials)]))) == 4
    for task in tasks:
        assert_same_bits(outcome(task, steps[task.name]), expected[task.name])


def test_attaching_costs_an_adapter_and_detaching_gives_it_back() -> None:
    backbone = backbone_of()
    engine = Engine(backbone)
    keep = attach(engine, VICTIM)
    values = keep.adapter.parameters.values.clone()
    for _ in range(3):
        task = attach(engine, OTHER)
        with pytest.raises(ConfigError, match="attached already"):
            attach(engine, OTHER)
        engine.forward_backward({task: OTHER.examples})
        engine.detach(task)
        assert not task.adapter.parameters.gradient.any(), "a detached task holds a gradient"
    assert set(engine.tasks) == {"victim"}
    assert {name.split("/")[0] for name in engine.sources} == {"victim"}
    assert torch.equal(keep.adapter.parameters.values, values)
