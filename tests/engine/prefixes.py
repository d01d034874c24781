"""Tasks whose examples begin alike, and each with its twin that shares nothing."""

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
from muxtune.plan.types import ItemOutcome, MicroBatch, RoundRecord, SequenceRef, StepOutcome
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PeftBase, PrefixTuning, PromptTuning, Shira
from tests.engine.build import exact
from tests.tiny_tokenizer import VOCAB

# Each type; LoRA on the ends too, whose rows are ids, and gathered ones.
TYPES: dict[str, PeftBase] = {
    "lora": Lora(r=4),
    "ends": Lora(r=3, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "last": Lora(r=3, target_modules=["layers.1.mlp.up_proj"]),
    "rslora": Lora(r=8, use_rslora=True),
    "dora": Lora(r=4, use_dora=True),
    "pissa": Lora(r=2, init_lora_weights="pissa"),
    "ia3": IA3(),
    "houlsby": Bottleneck(placement="houlsby", bottleneck_size=5),
    "parallel": Bottleneck(placement="parallel", bottleneck_size=8),
    "bitfit": BitFit(),
    "norms": LnTuning(),
    "shira": Shira(r=2),
    "prefix": PrefixTuning(num_virtual_tokens=5),
    "prompt": PromptTuning(num_virtual_tokens=3),
}


@dataclass(frozen=True, slots=True)
class Alike:
    """A task of one optimizer step a batch. `sequences` come as they are."""

    name: str
    peft: PeftBase
    sequences: tuple[TokenSequence, ...]
    method: str = "sft"
    seed: int = 1
    chunk_tokens: int | None = None
    share: bool = True
    steps: int = 1

    @property
    def job(self) -> JobSpec:
        group = 2 if self.method == "dpo" else 1
        return JobSpec(
            name=self.name,
            datasets=["unread.jsonl"],
            peft=self.peft,
            method=self.method,
            max_steps=self.steps,
            per_device_train_batch_size=max(1, len(self.sequences) // group // self.steps),
            learning_rate=1e-2,
            max_grad_norm=0.0,
            seed=self.seed,
            shuffle=False,
            share_prefixes=self.share,
        )

    @property
    def apart(self) -> Alike:
        """The twin that shares nothing."""
        return replace(self, share=False)


def chat(
    rests: Sequence[int], *, head: int = 40, seed: int = 0, trained_head: float = 0.0, first_index: int = 0
) -> tuple[TokenSequence, ...]:
    """Examples of `head` common tokens and a rest each, which is trained but for its first tokens, as is a share of the
    head; a token that is in no loss ends each."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, size=head, dtype=np.int32)
    in_head = rng.random(head) < trained_head
    made = []
    for place, rest in enumerate(rests):
        ids = np.concatenate([common, rng.integers(3, VOCAB, size=rest + 1, dtype=np.int32)])
        mask = np.concatenate([in_head, rng.random(rest + 1) < 0.7])
        mask[0], mask[-2], mask[-1] = False, True, False
        made.append(TokenSequence(first_index + place, ids, mask))
    return tuple(made)


def attach(engine: Engine, trial: Alike, validation: Sequence[TokenSequence] = ()) -> Task:
    """From values at which everything has a gradient."""
    task = engine.attach(trial.job, Sequences(trial.sequences, validation), chunk_tokens=trial.chunk_tokens)
    generator = torch.Generator().manual_seed(trial.seed)
    with torch.no_grad():
        for view in task.adapter.parameters.views.values():
            view += 0.1 * torch.randn(view.shape, generator=generator).to(view)
    task.adapter.refresh()
    return task


@dataclass(frozen=True, slots=True)
class Stepped:
    """One optimizer step: copies."""

    outcome: StepOutcome
    record: RoundRecord
    gradient: Tensor
    values: Tensor

    @property
    def refs(self) -> list[SequenceRef]:
        return [ref for one in passes(self.record) for item in one.items for ref in item.sequences]

    @property
    def items(self) -> list[ItemOutcome]:
        return [item for action in self.record.actions for item in action.items]


def step(backbone: Backbone, trial: Alike, *others: Alike, **options: object) -> Stepped:
    """The trial's first step, in one round with that of the others; `options` are the engine's."""
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)  # type: ignore[arg-type]
        tasks = [attach(engine, one) for one in (trial, *others)]
        participants = [task.participant() for task in tasks]
        engine.refer(participants)
        gradients = []
        taken = tasks[0].optimizer.gradient_norm

        def noted() -> float:
            gradients.append(tasks[0].adapter.parameters.gradient.clone())
            return taken()

        tasks[0].optimizer.gradient_norm = noted  # type: ignore[method-assign]
        record = engine.execute(engine.schedule(participants))
    (outcome,) = [action.step for action in record.actions if action.step and action.step.task == trial.name]
    return Stepped(outcome, record, gradients[0], tasks[0].adapter.parameters.values.clone())


def passes(record: RoundRecord) -> list[MicroBatch]:
    return [action for action in record.schedule.actions if isinstance(action, MicroBatch)]
