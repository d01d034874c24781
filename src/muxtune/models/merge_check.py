"""Does a merged model do what base + adapter does? Asked of the files themselves, in transformers' own arithmetic.

The boundary: a folder, and a function that gives the logits to compare with; two numbers out. A merge can go wrong
without a word where a library renames weights between versions; logits cannot be fooled. Costs a load of the merged
model in fp32 and a forward pass of 32 tokens, after what the function costs (the base and two passes).

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from muxtune.errors import AdapterError
from muxtune.models.loading import reading

# The ids [T] of a prompt, made from the size of the vocabulary -> logits [T, V] of the base, and of base + adapter.
Prompt: TypeAlias = Callable[[int], Tensor]
Adapted: TypeAlias = Callable[[Prompt], tuple[Tensor, Tensor]]

_CHECKED_TOKENS = 32


def compare_logits(adapted: Adapted, merged: Path) -> tuple[float, float]:
    """Largest logit difference of the merged model, and of the base, from base + adapter.

    Raises:
        AdapterError: the merged model is no nearer to base + adapter than the base is.
    """
    plain_TV, adapted_TV = adapted(fixed_prompt)
    gc.collect()  # modules refer to each other in rings; the second model should not find the first still in memory
    difference = float((_logits(_load(merged)) - adapted_TV).abs().max())
    effect = float((plain_TV - adapted_TV).abs().max())
    if effect > 0 and not difference < effect:
        raise AdapterError(
            f"the merged model's logits differ from base + adapter by {difference:.3g}, the base's own by {effect:.3g}",
            hint="the merge would not act as the adapter does; merge in float32, or use the adapter unmerged",
        )
    return difference, effect


def fixed_prompt(vocabulary: int) -> Tensor:
    """Ids [T] that reach over the whole vocabulary."""
    return torch.linspace(0, vocabulary - 1, _CHECKED_TOKENS).long()


def _load(folder: Path) -> PreTrainedModel:
    with reading("the weights", folder):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    return model.eval()


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """[T, V] of the fixed prompt."""
    ids_T = fixed_prompt(model.config.get_text_config().vocab_size)
    logits: Tensor = model(ids_T[None], use_cache=False).logits[0]
    return logits.float()
