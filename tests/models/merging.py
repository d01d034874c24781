"""LoRA as changes of weights and as logits beside the base: what the tests of merging share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from muxtune.models.merge import Changes, MergeReport, merge_into
from muxtune.models.merge_check import Adapted, Prompt
from muxtune.models.sources import ModelFolder
from tests.peft.adapters import Pairs, adapted_logits


def model_folder(path: Path, cache: Path) -> ModelFolder:
    return ModelFolder("tiny", path, "tests/tiny", "dequantised Q4_1", cache)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def changes_of(pairs: Pairs, scale: float) -> Changes:
    """W + scale * B A."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, (lora_a_RI, lora_b_OR) in pairs.items():
        changes[f"{name}.weight"] = partial(torch.add, scale * (lora_b_OR @ lora_a_RI))
    return changes


def beside(base: ModelFolder, pairs: Pairs, scale: float) -> Adapted:
    """The logits of base + pairs, by transformers and hooks."""

    def logits(prompt: Prompt) -> tuple[Tensor, Tensor]:
        model = load(base.path)
        ids = prompt(model.config.vocab_size)[None]
        with torch.no_grad():
            plain: Tensor = model(ids).logits[0]
        return plain, adapted_logits(model, pairs, scale, ids)[0]

    return logits


def merge(base: ModelFolder, pairs: Pairs, dest: Path, *, scale: float, **options: Any) -> MergeReport:
    """`merge_into` with both; `options` are its own."""
    return merge_into(base, changes_of(pairs, scale), dest, adapted=beside(base, pairs, scale), **options)
