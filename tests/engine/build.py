"""Engines on tiny models, tasks for them, and the same tasks for the yardstick: what the tests of the core share.

A `Trial` says everything of one task - its adapter, data and schedule - so that it can be trained by the engine with
others, by the engine alone, and by transformers + peft (`tests.reference`). Its adapter starts from random matrices,
B included, so that the first step already has a gradient everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Sequences, Task
from muxtune.models import attention
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.peft.dropout import keep_mask, row_keys
from muxtune.peft.registry import build_adapter
from muxtune.spec.event import RunEvent, StepResult
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import Lora
from tests.exact import exact_fp64
from tests.reference import LoraPair, ReferenceResult, ReferenceTask, random_lora, train_reference
from tests.sequences import random_sequences
from tests.tiny import tiny_model

CPU = torch.device("cpu")
Targets = tuple[str, ...] | str


@dataclass(frozen=True, slots=True)
class Trial:
    """One LoRA task. `lengths` are those of its examples, `batch` of them make an optimizer step."""

    name: str
    lengths: Sequence[int]
    batch: int = 4
    steps: int = 3
    r: int = 4
    alpha: float = 8
    dropout: float = 0.0
    targets: Targets = "all-linear"
    learning_rate: float = 1e-2
    schedule: str = "linear"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 1
    shuffle: bool = False
    chunk_tokens: int | None = None

    @property
    def job(self) -> JobSpec:
        return JobSpec(
            name=self.name,
            datasets=["unread.jsonl"],
            peft=Lora(r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=self.targets),
            max_steps=self.steps,
            per_device_train_batch_size=self.batch,
            learning_rate=self.learning_rate,
            lr_scheduler_type=self.schedule,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    @property
    def examples(self) -> tuple[TokenSequence, ...]:
        return random_sequences(self.lengths, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a task came to: copies, to be compared bit for bit."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    pairs: Mapping[str, LoraPair] = field(default_factory=dict)


@contextmanager
def exact(dtype: torch.dtype) -> Iterator[None]:
    with exact_fp64() if dtype is torch.float64 else nullcontext():
        yield


def backbone_of(
    arch: str = "llama", dtype: torch.dtype = torch.float32, *, layers: int = 2, block: BlockChoice = "auto"
) -> Backbone:
    attention.register()
    return Backbone(tiny_model(arch, dtype=dtype, layers=layers), block)


def attach(engine: Engine, trial: Trial, examples: Sequence[TokenSequence] | None = None) -> Task:
    """Attach the trial and give its adapter the start values that the reference gets."""
    data = Sequences(trial.examples if examples is None else examples)
    task = engine.attach(trial.job, data, chunk_tokens=trial.chunk_tokens)
    task.adapter.load_pairs(start_values(engine.backbone, trial))
    return task


def start_values(backbone: Backbone, trial: Trial) -> dict[str, LoraPair]:
    adapter = build_adapter(trial.job.peft, backbone, seed=0, dtype=torch.float32, device=CPU)
    drawn = random_lora(backbone.model, r=trial.r, seed=trial.seed)
    return {name: drawn[name] for name in adapter.modules}


def run(engine: Engine) -> dict[str, list[StepResult]]:
    """Train all that is attached to its end; the step results by task."""
    return by_task(engine, list(Runner(engine).run()))


def by_task(engine: Engine, events: Sequence[RunEvent]) -> dict[str, list[StepResult]]:
    steps = [event for event in events if isinstance(event, StepResult)]
    return {name: [step for step in steps if step.task == name] for name in engine.tasks}


def outcome(task: Task, steps: Sequence[StepResult]) -> Trained:
    return Trained(
        [step.loss for step in steps],
        [step.grad_norm for step in steps],
        [step.lr for step in steps],
        task.adapter.parameters.values.detach().clone(),
        task.optimizer.moments(),
        {name: LoraPair(*(matrix.clone() for matrix in pair)) for name, pair in task.adapter.pairs().items()},
    )


def gradients_of(task: Task) -> dict[str, LoraPair]:
    """Copies of what has been accumulated, by attach point."""
    views = task.adapter.parameters.views
    gradients = {name: view.grad.clone() for name, view in views.items() if view.grad is not None}
    return {
        point: LoraPair(gradients[f"{point}.lora_A"], gradients[f"{point}.lora_B"]) for point in task.adapter.modules
    }


def train(backbone: Backbone, trials: Sequence[Trial], **options: object) -> dict[str, Trained]:
    """Train the trials together on an engine of their own; `options` are the engine's."""
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        tasks = [attach(engine, trial) for trial in trials]
        steps = run(engine)
        return {task.name: outcome(task, steps[task.name]) for task in tasks}


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses and one.losses
    assert one.grad_norms == other.grad_norms
    assert torch.equal(one.values, other.values)
    assert one.moments.keys() == other.moments.keys() != set()
    assert all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)


def reference(arch: str, trial: Trial, dtype: torch.dtype, *, layers: int = 2) -> ReferenceResult:
    """The trial trained by transformers + peft + torch's AdamW on padded batches, with our dropout masks put in."""
    assert not trial.shuffle, "the reference takes examples as they come"
    model = tiny_model(arch, dtype=dtype, layers=layers)
    attention.register()
    init = start_values(backbone_of(arch, layers=layers), trial)
    suffixes = sorted({name.rpartition(".")[2] for name in init}) if trial.targets == "all-linear" else trial.targets
    examples, count = trial.examples, len(trial.lengths)
    per_epoch = -(-count // trial.batch)
    batches = [
        examples[start * trial.batch : (start + 1) * trial.batch]
        for start in (step % per_epoch for step in range(trial.steps))
    ]
    task = ReferenceTask(
        batches,
        init,
        r=trial.r,
        lora_alpha=trial.alpha,
        targets=suffixes,
        learning_rate=trial.learning_rate,
        schedule=trial.schedule,
        warmup_steps=trial.warmup_steps,
        weight_decay=trial.weight_decay,
        max_grad_norm=trial.max_grad_norm,
        lora_dropout=trial.dropout,
        dropout_mask=partial(our_mask, trial),
    )
    with exact(dtype):
        return train_reference(model, task)


def our_mask(trial: Trial, attach_name: str, example: int, positions: Tensor, step: int, channels: int) -> Tensor:
    """The engine's mask, asked the reference's way; its steps count from 1."""
    place = positions.numpy()
    keys = row_keys(trial.seed, step - 1, place * 0 + example, place, CPU)
    return keep_mask(keys, attach_name, channels, trial.dropout)


def mixed_trials(arch: str) -> tuple[Trial, ...]:
    """Four tasks that differ in everything a task may: rank (one odd), targets, dropout, lengths (past the sliding
    window, too), batch, number of chunks and steps, schedule, decay and clipping."""
    attention_in, mlp, last = _targets(arch)
    return (
        Trial("all", [3, 20, 7, 12] * 3, r=4, seed=1),
        Trial(
            "drop", [10, 40, 25, 13] * 2, steps=4, r=8, alpha=4, dropout=0.3, targets=attention_in, seed=2,
            chunk_tokens=48,
        ),
        Trial(
            "short", [2, 6, 3, 4, 5], batch=3, r=3, targets=mlp, schedule="cosine", warmup_steps=1, weight_decay=0.1,
            max_grad_norm=0.05, seed=3,
        ),
        Trial("last", [9, 31], batch=1, steps=2, r=16, dropout=0.1, targets=last, seed=4),
    )  # fmt: skip


def _targets(arch: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Into attention, MLP and attention's output, and two linears of the last layer alone."""
    if arch == "gpt2":
        return ("c_attn",), ("c_fc", "mlp.c_proj"), ("h.1.mlp.c_fc", "h.1.attn.c_proj")
    if arch.startswith("opt"):
        return ("q_proj", "v_proj"), ("fc1", "fc2", "out_proj"), ("layers.1.fc1", "layers.1.self_attn.k_proj")
    return (
        ("q_proj", "v_proj"),
        ("gate_proj", "down_proj", "o_proj"),
        ("layers.1.mlp.up_proj", "layers.1.self_attn.k_proj"),
    )
