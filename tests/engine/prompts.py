"""Tasks that learn positions - prefixes and prompts - and others beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.peft.registry import payload
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import Lora, PeftBase, PrefixTuning, PromptTuning
from tests.engine.build import exact, run
from tests.sequences import random_sequences
from tests.tiny import WINDOW

# Two key heads; no groups; learned absolute positions, twice; windows and soft caps; windows alone; input projections.
ARCHS = ("llama", "gpt2", "opt", "gemma2", "mistral", "opt-350m")
TENSOR = "prompt_embeddings"


@dataclass(frozen=True, slots=True)
class PeftTrial:
    """One task of any PEFT type, from the start values of its seed."""

    name: str
    peft: PeftBase
    lengths: Sequence[int]
    batch: int = 4
    steps: int = 3
    learning_rate: float = 1e-2
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 1
    chunk_tokens: int | None = None

    @property
    def job(self) -> JobSpec:
        return JobSpec(
            name=self.name,
            datasets=["unread.jsonl"],
            peft=self.peft,
            max_steps=self.steps,
            per_device_train_batch_size=self.batch,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            shuffle=False,
        )

    @property
    def examples(self) -> tuple[TokenSequence, ...]:
        return random_sequences(self.lengths, seed=self.seed)

    @property
    def batches(self) -> list[tuple[TokenSequence, ...]]:
        """Of each optimizer step."""
        per_epoch = -(-len(self.lengths) // self.batch)
        starts = [self.batch * (step % per_epoch) for step in range(self.steps)]
        return [self.examples[start : start + self.batch] for start in starts]


# Prefixes and prompts shorter and longer than a sliding window; sequences, too.
PREFIX = PeftTrial("prefix", PrefixTuning(num_virtual_tokens=5), [3, 20, 7, 12] * 2, weight_decay=0.1, seed=1)
LONG_PREFIX = PeftTrial(
    "long-prefix",
    PrefixTuning(num_virtual_tokens=WINDOW + 5),
    [10, 2, 25, 13, 4],
    batch=3,
    steps=4,
    max_grad_norm=0.05,
    seed=2,
    chunk_tokens=30,
)
PROMPT = PeftTrial("prompt", PromptTuning(num_virtual_tokens=7), [6, 18, 2, 9], batch=2, max_grad_norm=0.05, seed=3)
LONG_PROMPT = PeftTrial(
    "long-prompt", PromptTuning(num_virtual_tokens=WINDOW + 1), [5, 30, 11], batch=3, steps=2, seed=4, chunk_tokens=50
)
LEARNED = (PREFIX, LONG_PREFIX, PROMPT, LONG_PROMPT)
BESIDE = (
    PeftTrial("lora", Lora(r=4), [3, 20, 7, 12] * 2, seed=5),
    PeftTrial("drop", Lora(r=3, lora_dropout=0.3), [10, 31, 2], batch=1, steps=4, seed=6, chunk_tokens=48),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What a task came to: copies."""

    losses: list[float]
    grad_norms: list[float]
    start: Tensor
    values: Tensor
    moments: dict[str, Tensor]
    tensors: dict[str, Tensor] = field(default_factory=dict)  # as exported, in the adapter's own precision


def attach(engine: Engine, spec: PeftTrial) -> Task:
    task = engine.attach(spec.job, Sequences(spec.examples), chunk_tokens=spec.chunk_tokens)
    if isinstance(spec.peft, Lora):  # B starts at zero, where half of the gradients are none
        drawn = torch.randn(task.adapter.parameters.values.shape, generator=torch.Generator().manual_seed(spec.seed))
        task.adapter.load({name: 0.1 * _like(view, drawn) for name, view in task.adapter.parameters.views.items()})
    return task


def _like(view: Tensor, drawn: Tensor) -> Tensor:
    return drawn[: view.numel()].view(view.shape)


def train(backbone: Backbone, tasks: Sequence[PeftTrial], **options: object) -> dict[str, Result]:
    """Train the tasks together, on an engine of their own."""
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        attached = [attach(engine, spec) for spec in tasks]
        starts = {task.name: task.adapter.parameters.values.clone() for task in attached}
        steps = run(engine)
    return {
        task.name: Result(
            [step.loss for step in steps[task.name]],
            [step.grad_norm for step in steps[task.name]],
            starts[task.name],
            task.adapter.parameters.values.clone(),
            dict(task.optimizer.moments()),
        )
        for task in attached
    }


def matrix(backbone: Backbone, spec: PeftTrial, values: Tensor) -> Tensor:
    """The adapter of these flat values as peft's one matrix, in their precision."""
    task = attach(Engine(backbone), spec)
    task.adapter.parameters.values.copy_(values)
    views = [view.detach().clone() for view in task.adapter.parameters.views.values()]
    whole = torch.cat(views, dim=1)
    exported = payload(spec.peft, task.adapter, backbone).tensors[TENSOR]
    assert torch.equal(exported, whole.float())
    return whole
