"""Tasks on preference pairs: of any PEFT type, beside others or alone, and counted passes of the bare backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch, RoundRecord, RoundSchedule
from muxtune.spec.event import StepResult
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PeftBase, PrefixTuning, PromptTuning, Shira
from tests.engine.build import exact, run
from tests.engine.prompts import PeftTrial
from tests.tiny_tokenizer import VOCAB

TYPES: dict[str, PeftBase] = {
    "lora": Lora(r=4),
    "drop": Lora(r=3, lora_dropout=0.3),
    "dora": Lora(r=4, use_dora=True),
    "pissa": Lora(r=2, init_lora_weights="pissa"),
    "ia3": IA3(),
    "houlsby": Bottleneck(placement="houlsby", bottleneck_size=5),
    "bitfit": BitFit(),
    "norms": LnTuning(),
    "shira": Shira(r=2),
    "prefix": PrefixTuning(num_virtual_tokens=5),
    "prompt": PromptTuning(num_virtual_tokens=3),
}


@dataclass(frozen=True, slots=True)
class PairTrial:
    """One dpo task. Pair p has a prompt of `prompts[p]` tokens and responses of `responses[p]` (chosen, rejected)."""

    name: str
    peft: PeftBase
    prompts: Sequence[int] = (4, 9, 2, 6, 11)
    responses: Sequence[tuple[int, int]] = ((3, 8), (12, 2), (5, 5), (1, 20), (7, 4))
    batch: int = 2
    steps: int = 3
    beta: float = 0.5
    learning_rate: float = 1e-2
    max_grad_norm: float = 1.0
    seed: int = 1
    chunk_tokens: int | None = None

    @property
    def job(self) -> JobSpec:
        return JobSpec(
            name=self.name,
            method="dpo",
            datasets=["unread.jsonl"],
            beta=self.beta,
            peft=self.peft,
            max_steps=self.steps,
            per_device_train_batch_size=self.batch,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            shuffle=False,
        )

    @property
    def examples(self) -> tuple[TokenSequence, ...]:
        return random_pairs(self.prompts, self.responses, seed=self.seed)


def random_pairs(
    prompts: Sequence[int], responses: Sequence[tuple[int, int]], *, seed: int
) -> tuple[TokenSequence, ...]:
    """Chosen, rejected, chosen, ...: the two of a pair begin alike, and what follows that is trained."""
    rng = np.random.default_rng(seed)
    made: list[TokenSequence] = []
    for prompt, pair in zip(prompts, responses, strict=True):
        context = rng.integers(3, VOCAB, size=prompt, dtype=np.int32)
        for size in pair:
            ids = np.concatenate([context, rng.integers(3, VOCAB, size=size, dtype=np.int32)])
            made.append(TokenSequence(len(made), ids, np.arange(prompt + size) >= prompt))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task came to: copies."""

    steps: list[StepResult]
    values: Tensor
    moments: dict[str, Tensor]

    @property
    def numbers(self) -> list[StepResult]:
        """Its steps but for the time they took."""
        return [replace(step, time_s=0.0) for step in self.steps]


def attach(engine: Engine, trial: PairTrial | PeftTrial, *, validation: Sequence[TokenSequence] = ()) -> Task:
    """Attach the trial, started some way from its start values, so that every margin is something at once."""
    task = engine.attach(trial.job, Sequences(trial.examples, validation), chunk_tokens=trial.chunk_tokens)
    generator = torch.Generator().manual_seed(trial.seed)
    with torch.no_grad():
        for view in task.adapter.parameters.views.values():
            view += 0.1 * torch.randn(view.shape, generator=generator).to(view)
    task.adapter.refresh()
    return task


def train(backbone: Backbone, trials: Sequence[PairTrial | PeftTrial], **options: object) -> dict[str, Outcome]:
    """Train the trials together, on an engine of their own."""
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        tasks = [attach(engine, trial) for trial in trials]
        steps = run(engine)
        return {
            task.name: Outcome(
                steps[task.name],
                task.adapter.parameters.values.detach().clone(),
                dict(task.optimizer.moments()),
            )
            for task in tasks
        }


class CountingEngine(Engine):
    """Counts what it runs on the bare backbone: the tokens of each sequence, pass by pass."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.referred: list[list[int]] = []

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        for action in schedule.actions:
            if isinstance(action, MicroBatch):
                bare = [ref.length for item in action.items if item.task is None for ref in item.sequences]
                if bare:
                    self.referred.append(bare)
        return super().execute(schedule)


SFT = PeftTrial("sft", Lora(r=5, lora_dropout=0.1), [8, 14, 5, 22, 9, 3], batch=3, seed=21, chunk_tokens=24)
