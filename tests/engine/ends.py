"""LoRA tasks on the token embedding and the head, alone and with linears, and tasks of other types beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from muxtune.data.types import TokenSequence
from muxtune.spec.peft import BitFit, Lora, PeftBase, PromptTuning
from tests.engine.linears import trial_called
from tests.engine.prompts import PeftTrial
from tests.sequences import random_sequences

# Untied and tied; no padding entry; scaled embeddings, one with a soft cap; an embedding narrower than the model.
ARCHS = ("llama", "llama-tied", "gpt2", "gemma2", "gemma3", "opt-350m")
_PADDING = 0


@dataclass(frozen=True, slots=True)
class EndTrial(PeftTrial):
    """Among its tokens is the padding entry, for which PyTorch learns nothing."""

    @property
    def examples(self) -> tuple[TokenSequence, ...]:
        drawn = random_sequences(self.lengths, seed=self.seed)
        return tuple(replace(one, ids=np.where(one.ids % 7 == 3, _PADDING, one.ids)) for one in drawn)


def embedding_of(arch: str) -> str:
    return "wte" if arch == "gpt2" else "embed_tokens"


def linears_of(arch: str) -> tuple[str, ...]:
    return {"gpt2": ("h.1.attn.c_attn",), "opt-350m": ("layers.1.fc1",)}.get(arch, ("layers.1.self_attn.q_proj",))


def on_ends(arch: str) -> tuple[PeftTrial, ...]:
    """Both ends with and without linears, and each alone; the last has more trained rows than a slice of the head."""
    embedding = embedding_of(arch)
    both = (embedding, "lm_head", *linears_of(arch))
    return (
        _trial("both", Lora(r=4, target_modules=both), [3, 20, 7, 12] * 2, weight_decay=0.1, seed=1),
        _trial("embedding", Lora(r=3, use_rslora=True, target_modules=(embedding,)), [10, 31, 2, 9], batch=2, seed=2),
        _trial(
            "head", Lora(r=5, lora_alpha=4, lora_dropout=0.3, target_modules=("lm_head",)), [5, 17, 8, 25], steps=4,
            max_grad_norm=0.05, seed=3, chunk_tokens=24,
        ),
        _trial(
            "long", Lora(r=8, lora_dropout=0.1, target_modules=("lm_head", embedding)), [150, 170, 140, 9], batch=3,
            steps=2, seed=4, chunk_tokens=600,
        ),
    )  # fmt: skip


def beside(arch: str) -> tuple[PeftTrial, ...]:
    return (
        trial_called("lora"),
        trial_called("dora-drop"),
        PeftTrial("bitfit", BitFit(), [6, 18, 2, 9, 5], batch=3, seed=5),
        PeftTrial("prompt", PromptTuning(num_virtual_tokens=3), [6, 18, 2, 9], batch=2, seed=6),
    )


def _trial(name: str, peft: PeftBase, lengths: Sequence[int], **keys: object) -> EndTrial:
    return EndTrial(name, peft, lengths, **keys)  # type: ignore[arg-type]


NAMES = ("both", "embedding", "head", "long")
