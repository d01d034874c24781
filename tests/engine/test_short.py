"""A task short of memory alone: it recomputes before it fails, and goes on with the bits it would have had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.failure import of_memory
from muxtune.engine.rounds import run_round
from muxtune.engine.runner import Runner
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch, RoundRecord, RoundSchedule
from tests.engine.build import Trial, assert_same_bits, attach, backbone_of, by_task, outcome, train
from tests.engine.test_raising import failures, warnings_of
from tests.sequences import random_sequences

CAST = (
    Trial("one", [5, 17, 9, 21], steps=4, r=6, dropout=0.1, seed=1),
    Trial("wide", [6, 18, 11, 40], steps=4, r=4, dropout=0.1, seed=5, chunk_tokens=48),
    Trial("two", [8, 30, 13, 4], steps=4, r=8, seed=2, chunk_tokens=21),
)
FROM_STEP = 1
TORCHS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
)


@dataclass
class Hungry:
    """A LoRA module that has no memory in passes which keep their activations, from the task's step `FROM_STEP` on."""

    module: Any
    task: Task
    engine: _Watched
    error: BaseException

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: Any) -> Any:
        if self.task.step >= FROM_STEP and keys is not None and not self.engine.lean:
            raise self.error
        return self.module.forward_rows(x_tI, y_tO, keys)


class _Watched(Engine):
    """Knows how the pass in progress runs, and keeps what was asked for."""

    lean = False

    def __init__(self, backbone: Backbone, **options: Any) -> None:
        super().__init__(backbone, **options)
        self.trained: list[tuple[int, set[str | None], bool]] = []

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        for action in schedule.actions:
            if isinstance(action, MicroBatch) and action.trains:
                named = {item.task for item in action.items}
                self.trained.append((schedule.round, named, action.recompute))
        return super().execute(schedule)


def _watch(engine: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = engine.backbone.hidden

    def watched(*arguments: Any, recompute: bool = False) -> Tensor:
        engine.lean = recompute
        return hidden(*arguments, recompute=recompute)

    monkeypatch.setattr(engine.backbone, "hidden", watched)


def _hunger(engine: _Watched, task: Task, error: BaseException) -> None:
    name = list(task.adapter.modules)[-1]
    task.adapter.modules = {**task.adapter.modules, name: Hungry(task.adapter.modules[name], task, engine, error)}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of("qwen3")


@pytest.mark.parametrize(
    "error",
    [MemoryError("9 bytes"), torch.OutOfMemoryError("9 bytes"), RuntimeError(TORCHS)],
    ids=lambda e: str(type(e)),
)
@pytest.mark.parametrize("policy", ["sequential", "fuse-all"])
def test_it_recomputes_from_then_on_to_the_same_bits(
    policy: str, error: BaseException, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {trial.name: train(backbone, [trial])[trial.name] for trial in CAST}
    engine = _Watched(backbone, policy=policy)
    _watch(engine, monkeypatch)
    tasks = {trial.name: attach(engine, trial) for trial in CAST}
    _hunger(engine, tasks["wide"], error)
    events = list(Runner(engine).run())
    assert not failures(events)
    told = warnings_of(events)
    assert [event.task for event in told] == ["wide"] + ["one"] * (policy == "fuse-all")  # a fused pass raised first
    assert "computed twice" in told[0].message and type(error).__name__ in told[0].message
    assert told[0].step == FROM_STEP + 1 and "Traceback" in str(told[0].data["traceback"])
    steps = by_task(engine, events)
    for trial in CAST:
        assert_same_bits(outcome(tasks[trial.name], steps[trial.name]), alone[trial.name])
    tried = [again for _, named, again in engine.trained if "wide" in named]
    assert tried == sorted(tried) and True in tried and False in tried, "once it recomputes, it always does"
    assert not any(again for _, named, again in engine.trained if "wide" not in named), "at nobody else's cost"


def test_where_nothing_is_left_to_save_it_fails_at_once(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Watched(backbone, recompute=True, policy="sequential")
    tasks = [attach(engine, trial) for trial in CAST]
    _hunger(engine, tasks[1], MemoryError("all gone"))
    events = list(Runner(engine).run())  # the engine's `lean` is never set: it raises whatever is done
    assert [(event.task, event.step, event.message) for event in failures(events)] == [
        ("wide", FROM_STEP, "MemoryError: all gone")
    ]
    assert not warnings_of(events)


def test_a_detached_name_is_not_remembered(backbone: Backbone) -> None:
    engine = Engine(backbone)
    attach(engine, CAST[0])
    assert engine.spare("one") and not engine.spare("one")
    engine.detach("one")
    attach(engine, CAST[0])
    assert engine.spare("one")


def test_an_evaluation_keeps_nothing_and_is_not_tried_again(backbone: Backbone) -> None:
    engine = Engine(backbone)
    trial = CAST[0]
    task = engine.attach(trial.job, Sequences(trial.examples, random_sequences([5, 9], seed=4)))
    name = list(task.adapter.modules)[-1]

    class Never(Hungry):
        def forward_rows(self, *_: Any) -> Any:
            raise MemoryError

    task.adapter.modules = {
        **task.adapter.modules,
        name: Never(task.adapter.modules[name], task, engine, MemoryError()),
    }
    found = run_round(engine, [task.validation_participant()], "eval")
    assert list(found.raised) == ["one"] and not found.spared and len(found.records) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), True),
        (RuntimeError(TORCHS), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_want_of_memory(error: Exception, expected: bool) -> None:
    assert of_memory(error) is expected


def test_torchs_own_refusal_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert of_memory(caught.value)
