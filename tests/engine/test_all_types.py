"""All PEFT types in one micro-batch: one pass of the backbone, each learns at once, and no precision leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models import attention
from muxtune.models.backbone import Backbone
from muxtune.models.head_rows import SLICE_ROWS
from muxtune.plan.types import MicroBatch
from tests.engine.build import backbone_of, exact
from tests.engine.cast import ARCHS, cast
from tests.engine.counting import Calls, Products
from tests.engine.prompts import PeftTrial
from tests.engine.selective import attach, relative
from tests.sequences import random_sequences
from tests.tiny import tiny_model

UNMOVED = {"lora": "lora_A", "bottleneck": "bottleneck_down"}  # while what comes after them is zero


def _one_chunk(arch: str) -> list[PeftTrial]:
    """The cast with all of a task's examples in one batch and one chunk."""
    return [replace(trial, batch=len(trial.lengths), chunk_tokens=None, weight_decay=0) for trial in cast(arch)]


def _rows(engine: Engine, tasks: Sequence[Task]) -> int:
    """Of the one micro-batch of all tasks, which is then run, without optimizer steps."""
    participants = [task.participant() for task in tasks]
    (batch,) = [action for action in engine.schedule(participants).actions if isinstance(action, MicroBatch)]
    total = sum(participant.widest for participant in participants)
    assert {item.task for item in batch.items} == {task.name for task in tasks}
    engine.forward_backward({task: task.data.train for task in tasks})
    return total + -total % 16


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arch", ARCHS)
def test_each_frozen_operator_runs_once_on_the_rows_of_all_types(
    arch: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice with recomputation, but for what lies outside the blocks. (Norm tuning's own rows go through a twin.)"""
    attention.register()
    model = tiny_model(arch)
    calls = Calls(model, monkeypatch)
    backbone = Backbone(model, "transformers")
    engine = Engine(backbone, recompute=recompute)
    rows = _rows(engine, [attach(engine, trial) for trial in _one_chunk(arch)])
    linears = set(backbone.attach_points)
    once = {name: 1 for name in calls.names.values() if name != "lm_head"}
    for name in once:
        if recompute and any(op.layer is not None for op in backbone.ops.values() if op.name == name):
            once[name] = 2
    assert dict(calls.hooked) == once
    assert dict(calls.by_class) == {name: count for name, count in once.items() if name not in linears}
    assert all(rows in shape for shape in calls.shapes)


@pytest.mark.parametrize("arch", ARCHS)
def test_each_weight_is_read_once_forward_and_once_backward(arch: str) -> None:
    """For all types together, as for one. DoRA with dropout reads the weight once more, on its own rows; it and what is
    done once an optimizer step stay out of this."""
    backbone = backbone_of(arch, block="transformers")
    engine = Engine(backbone)
    trials = [trial for trial in _one_chunk(arch) if trial.name != "dora"]
    tasks = [attach(engine, trial) for trial in trials]
    weights = {name: op.weight for name, op in backbone.attach_points.items()}
    with Products(weights | {"head": backbone.head.weight_VD}, backbone.model) as seen:
        rows = _rows(engine, tasks)
    assert {name: seen.rows[name] for name in weights} == dict.fromkeys(weights, rows)
    trained = sum(sequence.trained_tokens for task in tasks for sequence in task.data.train)
    slices = -(-trained // SLICE_ROWS)
    assert dict(seen.reads) == {**dict.fromkeys(weights, 2), "head": 2 * slices}  # a prompt lies below all of them


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_type_trains_moves_in_the_first_step(arch: str) -> None:
    """From its own start values, with all others beside it, in every targeted layer."""
    with exact(torch.float64):
        engine = Engine(backbone_of(arch, torch.float64))
        tasks = {trial.name: _fresh(engine, trial) for trial in _one_chunk(arch)}
        starts = {name: task.adapter.parameters.export() for name, task in tasks.items()}
        record = engine.execute(engine.schedule([task.participant() for task in tasks.values()]))
    assert sum(action.step is not None for action in record.actions) == len(tasks)
    for name, task in tasks.items():
        now = task.adapter.parameters.export()
        still = {key for key, value in now.items() if torch.equal(value, starts[name][key])}
        part = UNMOVED.get(task.job.peft.type) if name != "pissa" else None
        assert still == {key for key in now if part is not None and part in key}, name


def _fresh(engine: Engine, trial: PeftTrial) -> Task:
    return engine.attach(trial.job, Sequences(trial.examples), chunk_tokens=trial.chunk_tokens)


def _gradients(backbone: Backbone, trials: Sequence[PeftTrial]) -> dict[str, dict[str, Tensor]]:
    """Of one fused pass, by task and parameter."""
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in trials]
    engine.forward_backward({task: task.data.train for task in tasks})
    return {
        task.name: {key: view.grad.clone() for key, view in task.adapter.parameters.views.items()} for task in tasks
    }


@pytest.mark.parametrize("arch", ARCHS)
def test_a_rounded_backbone_rounds_nobodys_parameters(arch: str) -> None:
    """bf16 under fp32 adapters of all types: what each learns is near what it learns on the fp32 backbone."""
    low, full = backbone_of(arch, torch.bfloat16), backbone_of(arch)
    trials = _one_chunk(arch)
    ours, truth = _gradients(low, trials), _gradients(full, trials)
    for name, gradients in ours.items():
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        assert 0 < relative(gradients, truth[name]) < 0.1, name
    fine = [key for gradients in ours.values() for key, value in gradients.items() if _is_finer_than_bf16(value)]
    assert len(fine) == sum(len(gradients) for gradients in ours.values()), "a gradient went through bf16"


def _is_finer_than_bf16(value: Tensor) -> bool:
    return not torch.equal(value.bfloat16().float(), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_neighbours_type_changes_a_bit_of_a_gradient(arch: str, dtype: torch.dtype) -> None:
    """Nor of what a task without an adapter of its own gets from the backbone. Where rows of a bf16 product depend on
    the batch, by as much as that rounds."""
    backbone = backbone_of(arch, dtype)
    invariant = Engine(backbone).row_invariant
    assert invariant or dtype is torch.bfloat16
    trials = _one_chunk(arch)
    together = _gradients(backbone, trials)
    for trial in trials:
        alone = _gradients(backbone, [trial])[trial.name]
        same = all(torch.equal(together[trial.name][key], alone[key]) for key in alone)
        assert same if invariant else relative(together[trial.name], alone) < 0.02, trial.name
    beside, bare = _bare_logprobs(backbone, trials), _bare_logprobs(backbone, [])
    assert beside == bare if invariant else beside == pytest.approx(bare, abs=0.05)


def _bare_logprobs(backbone: Backbone, trials: Sequence[PeftTrial]) -> tuple[float, ...] | None:
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in trials]
    bare = _fresh(engine, PeftTrial("bare", cast("llama")[0].peft, [5]))
    bare.adapter.modules = {}
    batches = {task: list(task.data.train) for task in tasks[: len(tasks) // 2]}
    batches[bare] = list(random_sequences([17, 6], seed=3))
    batches |= {task: list(task.data.train) for task in tasks[len(tasks) // 2 :]}
    return engine.forward(batches)["bare"].logprobs
