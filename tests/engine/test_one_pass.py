"""One pass, truly: with many tasks in a micro-batch each frozen operator runs once, on the sum of their rows, and no
work is done for a gradient that nobody needs."""

from __future__ import annotations

import hashlib

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.engine.task import Task
from muxtune.models import attention
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch, RoundRecord
from tests.engine.build import Trial, attach, backbone_of, mixed_trials, run
from tests.engine.counting import Calls, Products
from tests.tiny import SUPPORTED, tiny_model


def _one_micro_batch(engine: Engine, trials: tuple[Trial, ...]) -> tuple[list[Task], RoundRecord]:
    """Train the first batch of every trial, all in one micro-batch."""
    tasks = [attach(engine, trial) for trial in trials]
    record = engine.execute(engine.schedule([task.participant() for task in tasks]))
    assert sum(isinstance(action, MicroBatch) for action in record.schedule.actions) == 1
    return tasks, record


def _four(arch: str) -> tuple[Trial, ...]:
    return tuple(
        Trial(trial.name, trial.lengths[:3], batch=3, targets=trial.targets, dropout=trial.dropout)
        for trial in mixed_trials(arch)
    )


@pytest.mark.parametrize("arch", SUPPORTED)
def test_each_module_of_the_backbone_runs_once_on_the_rows_of_all_tasks(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.register()
    model, trials = tiny_model(arch), _four(arch)
    calls = Calls(model, monkeypatch)
    backbone = Backbone(model, "transformers")
    engine = Engine(backbone)
    _, record = _one_micro_batch(engine, trials)
    total = sum(sum(trial.lengths) for trial in trials)
    padded = total + -total % 16
    linears = set(backbone.attach_points)
    others = set(calls.names.values()) - linears - {"lm_head"}  # the head runs on trained rows only, not as a module
    assert dict(calls.hooked) == dict.fromkeys(linears | others, 1)
    assert dict(calls.by_class) == dict.fromkeys(others, 1)
    assert record.actions[0].rows == padded and all(padded in shape for shape in calls.shapes)


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("arch", ["llama", "llama-tied", "gemma2", "gpt2", "opt-350m"])
def test_one_product_forward_one_backward_and_nothing_shaped_like_a_weight(arch: str, plain: bool) -> None:
    backbone = backbone_of(arch, block="transformers")
    engine = Engine(backbone, plain=plain)
    weights = {name: op.weight for name, op in backbone.attach_points.items()}
    with Products(weights | {"head": backbone.head.weight_VD}, backbone.model) as seen:
        _one_micro_batch(engine, _four(arch))
    rows = sum(sum(trial.lengths) for trial in _four(arch))
    for name in weights:
        # Every task hooks a part; below the lowest adapter nothing needs an input gradient (see below).
        assert seen.reads[name] in (1, 2), name
        assert seen.rows[name] == rows + -rows % 16, name
    assert max(seen.reads[name] for name in weights) == 2
    assert seen.reads["head"] == 2
    shapes = {tuple(parameter.shape) for parameter in backbone.model.parameters() if parameter.dim() == 2}
    assert seen.made & (shapes | {shape[::-1] for shape in shapes}) == set(), "a gradient the size of a weight"


def test_nothing_below_the_lowest_adapter_takes_part_in_the_backward_pass() -> None:
    backbone = backbone_of("llama", layers=3, block="transformers")
    engine = Engine(backbone)
    weights = {name: op.weight for name, op in backbone.attach_points.items()}
    with Products(weights, backbone.model) as seen:
        _one_micro_batch(engine, (Trial("top", [9, 12], targets=("layers.1.mlp.up_proj",)),))
    reads = {name.removeprefix("model.layers."): count for name, count in seen.reads.items()}
    below = {name for name in reads if name.startswith(("0.", "1.self_attn"))} | {"1.mlp.gate_proj", "1.mlp.up_proj"}
    assert {name for name, count in reads.items() if count == 1} == below
    assert {name for name, count in reads.items() if count == 2} == set(reads) - below


def test_the_head_sees_the_rows_that_predict_a_trained_token() -> None:
    backbone = backbone_of("llama")
    engine = Engine(backbone)
    trials = _four("llama")
    with Products({"head": backbone.head.weight_VD}, backbone.model) as seen:
        _, record = _one_micro_batch(engine, trials)
    trained = sum(item.tokens for item in record.actions[0].items)
    assert seen.reads["head"] == 2
    assert seen.rows["head"] == trained + -trained % 16 < record.actions[0].rows


def _bytes_hash(backbone: Backbone) -> str:
    digest = hashlib.sha256()
    for name, tensor in backbone.model.state_dict(keep_vars=True).items():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_backbone_is_frozen_gets_no_gradient_and_keeps_its_bytes(arch: str) -> None:
    backbone = backbone_of(arch)
    before = _bytes_hash(backbone)
    engine = Engine(backbone)
    for trial in _four(arch):
        attach(engine, trial)
    run(engine)
    tensors = [*backbone.model.parameters(), *backbone.model.buffers()]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert all(tensor.grad is None for tensor in tensors)
    assert _bytes_hash(backbone) == before


def test_a_hundred_steps_of_five_tasks_leave_the_backbone_as_it_was() -> None:
    """reports.md 14, with two more tasks attached that do not take part: nothing of theirs is touched."""
    backbone = backbone_of("llama", layers=1)
    before = _bytes_hash(backbone)
    engine = Engine(backbone)
    targets = ("all-linear", ("q_proj", "v_proj"), ("down_proj",), ("o_proj", "k_proj"), ("gate_proj", "up_proj"))
    five = [
        attach(engine, Trial(f"task-{place}", [3, 5, 4], batch=1, r=2 + place, targets=target, steps=20, seed=place))
        for place, target in enumerate(targets)
    ]
    idle = [attach(engine, Trial(f"idle-{place}", [3, 5], seed=place)) for place in (7, 8)]
    for task in idle:
        engine.pause(task)
    kept = [task.adapter.parameters.values.clone() for task in idle]
    steps = run(engine)
    assert sum(len(steps[task.name]) for task in five) == 100
    assert _bytes_hash(backbone) == before
    for task, values in zip(idle, kept, strict=True):
        assert torch.equal(task.adapter.parameters.values, values)
        assert not task.adapter.parameters.gradient.any() and not task.optimizer.moments()


def test_what_trains_in_a_step_is_the_parameters_of_the_tasks_that_take_part() -> None:
    """reports.md 14: counted by what got a gradient, against what each task's spec says it trains."""
    backbone = backbone_of("qwen2")
    engine = Engine(backbone)
    trials = _four("qwen2")
    tasks = {trial.name: attach(engine, trial) for trial in trials}
    part = [tasks["all"], tasks["last"]]
    engine.forward_backward({task: task.data.train for task in part})
    for task in tasks.values():
        touched = int((task.adapter.parameters.gradient != 0).sum())
        trains = task.job.peft.parameters(backbone.places)
        assert task.adapter.parameters.count == trains
        assert touched == (trains if task in part else 0)
