"""The yardstick for learned positions: one prefix or prompt trained with transformers, peft and torch's AdamW.

As in `tests.reference`, but for peft's prompt-learning methods, whose whole adapter is one matrix. The padded batches
and the loss are those of there.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler

from muxtune.data.types import TokenSequence
from muxtune.spec.peft import PeftBase, PrefixTuning
from tests.reference import ADAPTER, _Layout, pad


@dataclass(frozen=True, slots=True)
class PromptResult:
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    prompt_PX: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def peft_as_it_is() -> Iterator[None]:
    """peft 0.21 still calls transformers by names that transformers is giving up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def with_prompt(model: PreTrainedModel, spec: PeftBase, prompt_PX: Tensor | None = None) -> PeftModel:
    """peft's model of a copy of `model`, with these values."""
    kind = PrefixTuningConfig if isinstance(spec, PrefixTuning) else PromptTuningConfig
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=spec.lead)
    if kind is PromptTuningConfig:  # which peft takes for the model's own width, as OPT-350M's is not
        config.token_dim = model.get_input_embeddings().weight.shape[1]
    with peft_as_it_is():
        tuned = get_peft_model(copy.deepcopy(model), config).eval()
    if prompt_PX is not None:
        weight = prompt_of(tuned)
        assert weight.shape == prompt_PX.shape
        weight.data = prompt_PX.to(model.dtype, copy=True)
    return tuned


def prompt_of(tuned: PeftModel) -> nn.Parameter:
    weight = tuned.prompt_encoder[ADAPTER].embedding.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def train_prompt(
    tuned: PeftModel,
    batches: Sequence[Sequence[TokenSequence]],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
) -> PromptResult:
    """Train `tuned` in place on `batches`, one an optimizer step, under a linear schedule."""
    weight = prompt_of(tuned)
    assert [parameter for parameter in tuned.parameters() if parameter.requires_grad] == [weight]
    optimizer = torch.optim.AdamW([weight], lr=learning_rate, weight_decay=weight_decay)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(batches))
    result = PromptResult(prompt_PX=weight.detach())
    for batch in batches:
        denominator = sum(sequence.trained_tokens for sequence in batch)
        with peft_as_it_is():
            output = tuned(**pad(batch, "right", _Layout()), num_items_in_batch=denominator, use_cache=False)
        output.loss.backward()
        result.losses.append(float(output.loss.detach()))
        result.grad_norms.append(float(nn.utils.clip_grad_norm_([weight], max_grad_norm or math.inf)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return result
