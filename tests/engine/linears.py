"""Tasks of LoRA's kin and IA3, started away from their start values so that the first step has a gradient everywhere,
and the same tasks for the yardstick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.peft.dropout import keep_mask, row_keys
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import IA3, Lora
from tests.engine.build import CPU, backbone_of, exact, run
from tests.engine.prompts import PeftTrial
from tests.reference_linears import LinearResult, LinearTask, train_linears
from tests.tiny import tiny_model

KIN = (
    PeftTrial("rslora", Lora(r=3, use_rslora=True), [3, 20, 7, 12] * 2, seed=1),
    PeftTrial("dora", Lora(r=4, use_dora=True), [10, 31, 2, 9], batch=2, weight_decay=0.1, seed=2),
    PeftTrial(
        "dora-drop", Lora(r=8, lora_alpha=4, use_dora=True, use_rslora=True, lora_dropout=0.3), [5, 17, 8, 25],
        steps=4, seed=3, chunk_tokens=24,
    ),
    PeftTrial("pissa", Lora(r=4, init_lora_weights="pissa"), [4, 13, 21], batch=3, max_grad_norm=0.05, seed=4),
    PeftTrial(
        "pissa-drop", Lora(r=2, lora_alpha=3, lora_dropout=0.2, init_lora_weights="pissa"), [6, 2, 30, 11], batch=1,
        seed=5,
    ),
    PeftTrial("ia3", IA3(), [7, 19, 3, 26], weight_decay=0.2, max_grad_norm=0.05, seed=6),
    PeftTrial("lora", Lora(r=5, lora_dropout=0.1), [8, 14, 5], batch=2, seed=7),
)  # fmt: skip
NAMES = tuple(trial.name for trial in KIN)


def trial_called(name: str) -> PeftTrial:
    return next(trial for trial in KIN if trial.name == name)


@dataclass(frozen=True, slots=True)
class Result:
    """What a task came to: copies."""

    losses: list[float]
    grad_norms: list[float]
    values: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def attach(engine: Engine, trial: PeftTrial) -> Task:
    start = start_state(engine.backbone, trial)
    with exact(engine.backbone.dtype):
        task = engine.attach(trial.job, Sequences(trial.examples), chunk_tokens=trial.chunk_tokens)
        task.adapter.load(start)
    return task


def start_state(backbone: Backbone, trial: PeftTrial) -> dict[str, Tensor]:
    """A state whose trained values are some way from their start: the same fp32 numbers for every precision."""
    state = build_adapter(trial.peft, backbone, seed=trial.seed, dtype=torch.float32, device=CPU).state()
    generator = torch.Generator().manual_seed(trial.seed)
    return {
        name: value if ".start_" in name else value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in state.items()
    }


def train(backbone: Backbone, trials: Sequence[PeftTrial], **options: object) -> dict[str, Result]:
    """Train the trials together, on an engine of their own."""
    engine = Engine(backbone, **options)
    tasks = [attach(engine, trial) for trial in trials]
    with exact(backbone.dtype):
        steps = run(engine)
    return {
        task.name: Result(
            [step.loss for step in steps[task.name]],
            [step.grad_norm for step in steps[task.name]],
            {name: value.detach().clone() for name, value in task.adapter.parameters.views.items()},
            dict(task.optimizer.moments()),
        )
        for task in tasks
    }


def first_gradients(backbone: Backbone, trials: Sequence[PeftTrial], **options: object) -> dict[str, dict[str, Tensor]]:
    """Of every trial's first batch, all in one pass, by trial and parameter."""
    engine = Engine(backbone, **options)
    tasks = [attach(engine, trial) for trial in trials]
    with exact(backbone.dtype):
        engine.forward_backward({task: trial.batches[0] for task, trial in zip(tasks, trials, strict=True)})
    found: dict[str, dict[str, Tensor]] = {}
    for task in tasks:
        views = task.adapter.parameters.views
        found[task.name] = {name: view.grad.clone() for name, view in views.items() if view.grad is not None}
    return found


def reference(arch: str, trial: PeftTrial, dtype: torch.dtype) -> LinearResult:
    """The trial trained by transformers + peft + AdamW, from the same start and with our dropout masks put in."""
    start = {name: value.to(dtype) for name, value in start_state(backbone_of(arch), trial).items()}
    mask = partial(_our_mask, trial)
    task = LinearTask(
        trial.peft, trial.batches, start, trial.learning_rate, trial.weight_decay, trial.max_grad_norm, mask
    )
    with exact(dtype):
        return train_linears(tiny_model(arch, dtype=dtype), task)


def _our_mask(trial: PeftTrial, name: str, example: int, positions: Tensor, step: int, channels: int) -> Tensor:
    """The engine's mask, asked the reference's way; its steps count from 1."""
    assert isinstance(trial.peft, Lora)
    place = positions.numpy()
    keys = row_keys(trial.seed, step - 1, place * 0 + example, place, CPU)
    return keep_mask(keys, name, channels, trial.peft.lora_dropout)


def assert_same_bits(one: Result, other: Result) -> None:
    assert one.losses == other.losses and one.losses
    assert one.grad_norms == other.grad_norms
    assert one.values.keys() == other.values.keys()
    assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)
    assert one.moments.keys() == other.moments.keys() != set()
    assert all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)
