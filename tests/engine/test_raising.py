"""A pass that raises costs the task that made it raise, and nobody and nothing else (design contract 8)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.failure import PassError
from muxtune.engine.rounds import run_round
from muxtune.engine.runner import Runner
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch, RoundRecord, RoundSchedule
from muxtune.spec.event import EvalResult, RunEvent, StepResult, TaskEvent
from muxtune.spec.status import JobStatus
from tests.engine.build import Trial, assert_same_bits, attach, backbone_of, by_task, outcome, start_values, train
from tests.sequences import random_sequences

BAD = Trial("bad", [6, 18, 11, 4], steps=4, r=4, dropout=0.1, seed=5, chunk_tokens=18)
CAST = (
    Trial("one", [5, 17, 9, 21], steps=4, r=6, dropout=0.1, seed=1),  # one chunk: stepped before others are done
    BAD,
    Trial("two", [8, 30, 13, 4], steps=4, r=8, seed=2, chunk_tokens=21),
    Trial("three", [12, 3, 3], batch=2, steps=3, r=3, targets=("q_proj", "down_proj"), seed=3),
)
GOOD = tuple(trial for trial in CAST if trial is not BAD)
Where = str


@dataclass
class Faulty:
    """A LoRA module that raises at one place of the task's step `step`, from its `call`-th call on.

    It holds on to what it made in the pass that raised by a weak reference only.
    """

    module: Any
    task: Task
    where: Where
    step: int
    error: Callable[[str], BaseException]
    call: int
    calls: int = 0
    left: weakref.ref[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: Any) -> Any:
        self._perhaps("forward" if keys is not None else "eval", x_tI)
        return self.module.forward_rows(x_tI, y_tO, keys)

    def backward_output(self, x_tI: Tensor, *rest: Any) -> Any:
        self._perhaps("backward", x_tI)
        return self.module.backward_output(x_tI, *rest)

    def _perhaps(self, where: Where, x_tI: Tensor) -> None:
        if where == self.where and self.task.step == self.step:
            self.calls += 1
            if self.calls >= self.call:
                held = x_tI.clone()
                self.left = weakref.ref(held)
                raise self.error("broken here\nand a second line")


def break_(
    task: Task, where: Where, step: int = 0, error: Callable[[str], BaseException] = ValueError, call: int = 1
) -> Faulty:
    """Put a fault into the task's last module."""
    name = list(task.adapter.modules)[-1]
    faulty = Faulty(task.adapter.modules[name], task, where, step, error, call)
    task.adapter.modules = {**task.adapter.modules, name: faulty}
    return faulty


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of("qwen3")


@pytest.fixture(scope="module")
def alone(backbone: Backbone) -> dict[str, Any]:
    return {trial.name: train(backbone, [trial])[trial.name] for trial in CAST}


def failures(events: Sequence[RunEvent]) -> list[TaskEvent]:
    return [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]


def warnings_of(events: Sequence[RunEvent]) -> list[TaskEvent]:
    return [event for event in events if isinstance(event, TaskEvent) and event.kind == "warning"]


PLACES: list[tuple[Where, int, Callable[[str], BaseException]]] = [
    ("forward", 0, ValueError),
    ("backward", 0, torch.OutOfMemoryError),
    ("forward", 2, MemoryError),
    ("backward", 2, IndexError),
]


@pytest.mark.parametrize("options", [{}, {"policy": "sequential"}, {"fuse_tokens": 60}], ids=str)
@pytest.mark.parametrize(("where", "step", "error"), PLACES)
def test_a_task_whose_pass_raises_fails_alone(
    where: Where,
    step: int,
    error: Callable[[str], BaseException],
    options: dict[str, Any],
    backbone: Backbone,
    alone: dict[str, Any],
) -> None:
    engine = Engine(backbone, **options)
    tasks = {trial.name: attach(engine, trial) for trial in CAST}
    break_(tasks["bad"], where, step, error)
    events = list(Runner(engine).run())
    (failed,) = failures(events)
    assert (failed.task, failed.step, failed.data["code"]) == ("bad", step, "exception")
    assert failed.message == f"{error('').__class__.__name__}: broken here"
    assert "backward_output" in str(failed.data["traceback"]) or "forward_rows" in str(failed.data["traceback"])
    told = warnings_of(events)  # of what was tried before it failed, which helps where memory is short
    assert [(event.task, event.step) for event in told] == [("bad", step)] * (
        error in (MemoryError, torch.OutOfMemoryError)
    )
    assert all("computed twice" in event.message and events.index(event) < events.index(failed) for event in told)
    steps = by_task(engine, events)
    for trial in GOOD:
        assert_same_bits(outcome(tasks[trial.name], steps[trial.name]), alone[trial.name])
    assert [result.loss for result in steps["bad"]] == alone["bad"].losses[:step]
    bad = tasks["bad"]
    assert bad.status is JobStatus.FAILED and bad.step == step and not bad.has_pending
    assert not bad.adapter.parameters.gradient.any()


def test_the_record_of_a_round_that_raised_says_what_was_applied(backbone: Backbone) -> None:
    """The tasks of one chunk have had their step when another's second chunk raises."""
    engine = Engine(backbone)
    tasks = {trial.name: attach(engine, trial) for trial in CAST}
    break_(tasks["bad"], "forward", error=MemoryError, call=2)
    schedule = engine.schedule([task.participant() for task in tasks.values()])
    with pytest.raises(PassError, match="MemoryError: broken here") as caught:
        engine.execute(schedule)
    record = caught.value.record
    assert isinstance(caught.value.__cause__, MemoryError) and record.schedule is schedule
    assert record.raised is schedule.actions[len(record.actions)] and set(caught.value.tasks) == {"bad", "two"}
    stepped = {action.step.task for action in record.actions if action.step is not None}
    assert stepped == record.done == {"one", "three"} and {tasks[name].step for name in stepped} == {1}
    for name in ("bad", "two"):
        assert tasks[name].step == 0 and not tasks[name].has_pending
        assert not tasks[name].adapter.parameters.gradient.any()


def test_an_evaluation_that_raises_fails_its_task_alone(backbone: Backbone) -> None:
    """In its second pass, so that the first one's sums must not count twice."""
    held_out = random_sequences([14, 9, 20], seed=8)

    def attach_all(engine: Engine) -> dict[str, Task]:
        tasks = {}
        for trial in (CAST[0], BAD, CAST[2]):
            job = trial.job.model_copy(update={"eval_steps": 2})
            task = engine.attach(job, Sequences(trial.examples, held_out), chunk_tokens=16)
            task.adapter.load_pairs(start_values(backbone, trial))
            tasks[trial.name] = task
        return tasks

    undisturbed = Engine(backbone)
    attach_all(undisturbed)
    expected = [event for event in Runner(undisturbed).run() if isinstance(event, EvalResult)]
    engine = Engine(backbone)
    tasks = attach_all(engine)
    break_(tasks["bad"], "eval", 2, call=2)
    events = list(Runner(engine).run())
    assert [(event.task, event.step) for event in failures(events)] == [("bad", 2)]
    found = [event for event in events if isinstance(event, EvalResult)]
    assert found == [event for event in expected if event.task != "bad"]
    steps = [event.step for event in events if isinstance(event, StepResult) and event.task == "bad"]
    assert steps == [1, 2], "the steps before it were applied"


def test_what_raises_only_together_fails_nobody_and_runs_narrower(
    backbone: Backbone, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory does: wide passes raise, narrow ones do not."""
    hidden, widths = backbone.hidden, list[int]()

    def narrow(ids_T: Tensor, *rest: Any, **options: Any) -> Tensor:
        widths.append(len(ids_T))
        if len(ids_T) > 64:
            raise MemoryError(f"{len(ids_T)} rows")
        return hidden(ids_T, *rest, **options)

    monkeypatch.setattr(backbone, "hidden", narrow)
    engine = Engine(backbone)
    tasks = {trial.name: attach(engine, trial) for trial in CAST}
    events = list(Runner(engine).run())
    assert not failures(events)
    warnings = warnings_of(events)
    assert 1 <= len(warnings) == sum(width > 64 for width in widths) <= 2
    assert all("narrower" in event.message and "MemoryError: " in event.message for event in warnings)
    steps = by_task(engine, events)
    for trial in CAST:
        assert_same_bits(outcome(tasks[trial.name], steps[trial.name]), alone[trial.name])


def test_the_pass_that_raised_is_free_before_the_others_run_alone(backbone: Backbone) -> None:
    """Or those who run next find the memory still taken, which made it raise."""
    engine = _Watching(backbone)
    tasks = {trial.name: attach(engine, trial) for trial in CAST}
    engine.faulty = break_(tasks["bad"], "backward", 1)
    gc.disable()
    try:
        events = list(Runner(engine).run())
    finally:
        gc.enable()
    assert failures(events) and engine.asked > 1 and not engine.held


class _Watching(Engine):
    """Looks, at each execute, whether anything is left of a pass that raised."""

    faulty: Faulty | None = None
    asked = held = 0

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        left = self.faulty.left if self.faulty is not None else None
        if left is not None:
            self.asked += 1
            self.held += left() is not None
        return super().execute(schedule)


def test_an_optimizer_step_that_raises_fails_its_task(backbone: Backbone, alone: dict[str, Any]) -> None:
    engine = Engine(backbone)
    tasks = {trial.name: attach(engine, trial) for trial in CAST}

    def refresh() -> None:
        if tasks["bad"].step == 1:
            raise RuntimeError("no more")

    tasks["bad"].adapter.refresh = refresh  # type: ignore[method-assign]
    events = list(Runner(engine).run())
    assert [(event.task, event.message) for event in failures(events)] == [("bad", "RuntimeError: no more")]
    assert not tasks["bad"].has_pending
    steps = by_task(engine, events)
    for trial in GOOD:
        assert_same_bits(outcome(tasks[trial.name], steps[trial.name]), alone[trial.name])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_nobodys_failure(error: type[BaseException], backbone: Backbone) -> None:
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in CAST]
    break_(tasks[1], "backward", 1, error)
    with pytest.raises(error):
        list(Runner(engine).run())
    assert all(task.status is JobStatus.RUNNING and not task.has_pending for task in tasks)


def test_a_sampler_that_raises_costs_a_warning(backbone: Backbone) -> None:
    engine = Engine(backbone)
    task = attach(engine, replace(CAST[0], steps=1))
    task.job = task.job.model_copy(update={"sample_prompts": ("a",)})

    def sampler(task: Task) -> list[tuple[str, str]]:
        raise KeyError("a fault of the program")

    events = list(Runner(engine, sampler=sampler).run())
    (warning,) = warnings_of(events)
    assert warning.message == "sample_prompts: KeyError: 'a fault of the program'"
    assert task.status is JobStatus.COMPLETED


def test_the_bare_backbone_may_raise_like_anyone(backbone: Backbone) -> None:
    """Its pass is nobody's: whoever shared it goes on, and it ends."""

    class Barren(Engine):
        def execute(self, schedule: RoundSchedule) -> RoundRecord:
            items = [item for action in schedule.actions if isinstance(action, MicroBatch) for item in action.items]
            if any(item.task is None for item in items):
                raise PassError("ValueError: broken", RoundRecord(RoundSchedule(0, (MicroBatch(0, 0, ()),)), (), 0.0))
            return super().execute(schedule)

    engine = Barren(backbone)
    one = attach(engine, CAST[0]).participant()
    found = run_round(engine, [replace(one, task=None), one], "reference")
    assert list(found.raised) == [None] and found.raised[None].message == "PassError: ValueError: broken"
    assert [item.task for item in found.items("one")] == ["one"] and not found.parted


class _Logged(Engine):
    """Keeps which tasks each schedule names."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.ran: list[set[str | None]] = []

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        passes = [action for action in schedule.actions if isinstance(action, MicroBatch)]
        self.ran.append({item.task for action in passes for item in action.items})
        return super().execute(schedule)


class _NoFolder:
    def record(self, event: RunEvent) -> None: ...
    def checkpoint(self, task: Task) -> str:
        return "checkpoint"

    def complete(self, task: Task) -> str:
        return "adapter"


def _told(backbone: Backbone, changed: str, change: str, at: int) -> tuple[list[RunEvent], int]:
    """All events of a run in which, at event `at`, a task is changed; the events before the change."""
    engine = _Logged(backbone)
    for trial in (replace(CAST[0], steps=2), replace(CAST[3], steps=1), replace(CAST[3], name="done", steps=1)):
        job = trial.job.model_copy(update={"eval_steps": 1, "save_steps": 1, "sample_prompts": ("a",)})
        engine.attach(job, Sequences(trial.examples, random_sequences([5, 4], seed=3)))
    engine.task("done").step = 1
    folders = {name: _NoFolder() for name in engine.tasks}
    events: list[RunEvent] = []
    touched: int | None = None
    for event in Runner(engine, folders=folders, sampler=lambda task: [("a", "b"), ("c", "d")]).run():
        events.append(event)
        task = engine.tasks.get(changed)
        if len(events) - 1 == at and task is not None and (change == "detach" or not task.status.final):
            getattr(engine, change)(changed)
            touched = len(engine.ran)
    assert touched is None or not any(changed in names for names in engine.ran[touched:]), "it ran after it had left"
    return events, len(events)


@pytest.mark.parametrize("change", ["pause", "detach", "cancel"])
def test_whoever_hears_an_event_may_change_any_task(change: str) -> None:
    """At each event in turn: nothing raises, and a task that has left is not taken up again."""
    backbone = backbone_of("llama", layers=1)
    undisturbed, count = _told(backbone, "one", change, -1)
    assert count > 20
    for at in range(count):
        for changed in ("one", "three", "done"):
            events, _ = _told(backbone, changed, change, at)
            assert events[: at + 1] == _timeless(events, undisturbed)[: at + 1]
            after = [event.kind for event in events[at + 1 :] if isinstance(event, TaskEvent) and event.task == changed]
            before = [
                event.kind for event in events[: at + 1] if isinstance(event, TaskEvent) and event.task == changed
            ]
            if "completed" not in before:
                assert set(after) <= {"sample", "checkpoint"}, (at, changed, after)
                assert "checkpoint" not in after or change == "pause"


def _timeless(events: Sequence[RunEvent], expected: Sequence[RunEvent]) -> list[RunEvent]:
    """The expected events with the times of those that came."""
    return [
        replace(one, time_s=other.time_s) if isinstance(one, StepResult) and isinstance(other, StepResult) else one
        for one, other in zip(expected, events, strict=False)
    ]
