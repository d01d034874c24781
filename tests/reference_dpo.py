"""The yardstick for preference training: one LoRA task trained on pairs with transformers, peft and torch's AdamW.

As in `tests.reference`, whose padded batches and start values it shares. The reference model is the same one with the
adapter switched off, as peft's users do it; the loss is the published one, through autograd.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, get_scheduler

from muxtune.data.types import TokenSequence
from tests.reference import (
    IGNORED,
    DropoutMask,
    LoraPair,
    ReferenceTask,
    _InjectedDropout,
    _Layout,
    _lora_config,
    _start_from,
    _weights,
    lora_modules,
    pad,
)


@dataclass(frozen=True, slots=True)
class DpoResult:
    """`rewards` are (chosen, rejected) means and `accuracies` the share of positive margins, of each step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rewards: list[tuple[float, float]] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    adapter: dict[str, LoraPair] = field(default_factory=dict)


def train_dpo(model: PreTrainedModel, task: ReferenceTask, beta: float) -> DpoResult:
    """`task.batches` hold chosen, rejected, chosen, rejected, ...; `micro_batch` is left alone."""
    layout = _Layout()
    tuned = get_peft_model(copy.deepcopy(model), _lora_config(model, task)).eval()
    modules = lora_modules(tuned)
    for name, module in modules.items():
        _start_from(module, task.init[name])
        if task.lora_dropout > 0:
            module.lora_dropout["default"] = _InjectedDropout(
                name, task.lora_dropout, _known(task.dropout_mask), layout
            )
    parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=task.weight_decay)
    scheduler = get_scheduler(
        task.schedule, optimizer, num_warmup_steps=task.warmup_steps, num_training_steps=len(task.batches)
    )
    result = DpoResult()
    for step, batch in enumerate(task.batches, start=1):
        layout.step = step
        inputs = pad(batch, task.padding, layout)
        with torch.no_grad(), tuned.disable_adapter():
            reference_B = _sums(tuned, inputs)
        reward_B = beta * (_sums(tuned, inputs) - reference_B)
        loss = -F.logsigmoid(reward_B[::2] - reward_B[1::2]).mean()
        loss.backward()
        chosen_P, rejected_P = reward_B.detach()[::2], reward_B.detach()[1::2]
        result.losses.append(float(loss.detach()))
        result.rewards.append((float(chosen_P.mean()), float(rejected_P.mean())))
        result.accuracies.append(float((chosen_P > rejected_P).double().mean()))
        norm = nn.utils.clip_grad_norm_(parameters, task.max_grad_norm or math.inf)
        result.grad_norms.append(float(norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result.adapter.update({name: _weights(module) for name, module in modules.items()})
    return result


def _sums(tuned: PeftModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B]: log-probability of each sequence's trained tokens."""
    logits_BLV = tuned(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False).logits
    labels_BL = inputs["labels"][:, 1:]
    targets_BL = labels_BL.clamp(min=0)
    logprobs_BL = logits_BLV[:, :-1].log_softmax(-1).gather(-1, targets_BL[..., None])[..., 0]
    return (logprobs_BL * (labels_BL != IGNORED)).sum(-1)


def _known(mask: DropoutMask | None) -> DropoutMask:
    assert mask is not None
    return mask


def batches_of(examples: Sequence[TokenSequence], pairs: int, steps: int) -> list[Sequence[TokenSequence]]:
    """The batches of `pairs` pairs that a task without shuffling takes, epoch after epoch."""
    size, count = 2 * pairs, len(examples)
    per_epoch = -(-count // size)
    return [examples[(step % per_epoch) * size : (step % per_epoch + 1) * size] for step in range(steps)]
