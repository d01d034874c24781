"""Does a merged model do what base + adapter does? Asked of the files themselves, in transformers' own arithmetic.

The boundary: two folders and plain pairs of matrices in, two numbers out. A merge can go wrong without a word where a
library renames weights between versions; logits cannot be fooled. Costs two model loads in fp32, one after the other,
and three forward passes of 32 tokens.

Legend: R rank, I input features, O output features, T tokens, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from muxtune.errors import AdapterError
from muxtune.models.loading import reading

Pairs: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]  # module path -> (lora_a_RI, lora_b_OR)

_CHECKED_TOKENS = 32


def compare_logits(base: Path, merged: Path, adapter: Pairs, scale: float) -> tuple[float, float]:
    """Largest logit difference of the merged model, and of the base, from base + adapter.

    Raises:
        AdapterError: the merged model is no nearer to base + adapter than the base is.
    """
    model = _load(base)
    plain_TV = _logits(model)
    with _adapted(model, adapter, scale):
        adapted_TV = _logits(model)
    del model
    gc.collect()  # modules refer to each other in rings; the second model should not find the first still in memory
    difference = float((_logits(_load(merged)) - adapted_TV).abs().max())
    effect = float((plain_TV - adapted_TV).abs().max())
    if effect > 0 and not difference < effect:
        raise AdapterError(
            f"the merged model's logits differ from base + adapter by {difference:.3g}, the base's own by {effect:.3g}",
            hint="the merge would not act as the adapter does; merge in float32, or use the adapter unmerged",
        )
    return difference, effect


def _load(folder: Path) -> PreTrainedModel:
    with reading("the weights", folder):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    return model.eval()


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """Logits [T, V] of a fixed prompt that reaches over the whole vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    ids_T = torch.linspace(0, vocabulary - 1, _CHECKED_TOKENS).long()
    logits: Tensor = model(ids_T[None], use_cache=False).logits[0]
    return logits.float()


@contextmanager
def _adapted(model: PreTrainedModel, adapter: Pairs, scale: float) -> Iterator[None]:
    """Within: the model with the adapter beside its linears, in plain arithmetic."""
    with ExitStack() as stack:
        for name, (lora_a_RI, lora_b_OR) in adapter.items():

            def add(
                _: nn.Module, inputs: tuple[Tensor, ...], y: Tensor, a_RI: Tensor = lora_a_RI, b_OR: Tensor = lora_b_OR
            ) -> Tensor:
                return y + scale * (inputs[0] @ a_RI.to(y.dtype).T @ b_OR.to(y.dtype).T)

            stack.callback(model.get_submodule(name).register_forward_hook(add).remove)
        yield
