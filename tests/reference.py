"""The yardstick: one task trained the plain way, with transformers, peft and torch's AdamW on padded batches.

Nothing of this package's engine is used; the border type `TokenSequence` is all they share. The loss is transformers'
own (`labels` -100 outside the mask, `num_items_in_batch` = trained tokens of the whole optimizer batch), so splitting
a batch changes rounding only. The backbone stays in eval mode: its own dropout is off. LoRA dropout, where asked for,
is replaced by a given pure function, so that another implementation's masks can be put in.

Both sides start from the same matrices: `random_lora` draws them, by the module's name in the bare backbone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel, get_scheduler
from transformers.pytorch_utils import Conv1D

from muxtune.data.types import TokenSequence

ADAPTER = "default"
IGNORED = -100


class LoraPair(NamedTuple):
    """The two matrices of one attach point (I inputs, O outputs, R rank)."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor


LoraTensors = Mapping[str, LoraPair]


class DropoutMask(Protocol):
    """Which inputs of an adapter are kept: bool [len(positions), channels], a pure function of its arguments."""

    def __call__(
        self, attach_name: str, example: int, positions: torch.Tensor, step: int, channels: int
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ReferenceTask:
    """One LoRA task. `batches` holds the sequences of each optimizer step; `micro_batch` how many go in one pass."""

    batches: Sequence[Sequence[TokenSequence]]
    init: LoraTensors
    r: int = 8
    lora_alpha: float = 16
    targets: Sequence[str] | Literal["all-linear"] = "all-linear"
    learning_rate: float = 1e-3
    schedule: str = "linear"
    warmup_steps: int = 0
    total_steps: int | None = None  # of the schedule; None: the number of batches
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch: int | None = None
    padding: Literal["right", "left"] = "right"
    lora_dropout: float = 0.0
    dropout_mask: DropoutMask | None = None


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """What training gave. Gradients are those of step 1, before clipping; `logprobs[s][i]` is [T] of the i-th sequence
    of step s, before its update: the log-probability of each token after those before it (0 for the first)."""

    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    logprobs: list[list[torch.Tensor]] = field(default_factory=list)
    gradients: dict[str, LoraPair] = field(default_factory=dict)
    adapter: dict[str, LoraPair] = field(default_factory=dict)


@dataclass(slots=True)
class _Layout:
    """Where the sequences of the pass now running lie in its padded batch; read by the injected dropout."""

    examples: Sequence[TokenSequence] = ()
    starts: Sequence[int] = ()
    width: int = 0
    step: int = 0


class _InjectedDropout(nn.Module):
    """Stands where peft put its nn.Dropout, and drops what `mask` says instead of what an RNG says."""

    def __init__(self, attach_name: str, p: float, mask: DropoutMask, layout: _Layout) -> None:
        super().__init__()
        self.attach_name, self.p, self.mask, self.layout = attach_name, p, mask, layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout, channels = self.layout, x.shape[-1]
        # Some layers flatten batch and time (OPT's fc1); the memory order is the same.
        keep_BLI = torch.ones(len(layout.examples), layout.width, channels, dtype=x.dtype)
        for row, (example, start) in enumerate(zip(layout.examples, layout.starts, strict=True)):
            positions = torch.arange(len(example))
            keep_TI = self.mask(self.attach_name, example.index, positions, layout.step, channels)
            keep_BLI[row, start : start + len(example)] = keep_TI.to(x.dtype)
        return x * keep_BLI.view_as(x) / (1 - self.p)


def train_reference(model: PreTrainedModel, task: ReferenceTask) -> ReferenceResult:
    """Train `task` on a copy of `model`; the model itself stays as it is."""
    layout = _Layout()
    tuned = get_peft_model(copy.deepcopy(model), _lora_config(model, task))
    tuned.eval()
    modules = lora_modules(tuned)
    assert modules.keys() == task.init.keys(), sorted(modules.keys() ^ task.init.keys())
    for name, module in modules.items():
        _start_from(module, task.init[name])
        if task.lora_dropout > 0:
            assert task.dropout_mask is not None, "dropout is only exact with a mask function"
            module.lora_dropout[ADAPTER] = _InjectedDropout(name, task.lora_dropout, task.dropout_mask, layout)
    return _steps(tuned, task, modules, layout)


def _steps(tuned: PeftModel, task: ReferenceTask, modules: dict[str, LoraLayer], layout: _Layout) -> ReferenceResult:
    parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=task.weight_decay)
    scheduler = get_scheduler(
        task.schedule,
        optimizer,
        num_warmup_steps=task.warmup_steps,
        num_training_steps=task.total_steps or len(task.batches),
    )
    result = ReferenceResult()
    for step, batch in enumerate(task.batches, start=1):
        layout.step = step
        loss, logprobs = _accumulate(tuned, task, batch, layout)
        if step == 1:
            result.gradients.update({name: _gradients(module) for name, module in modules.items()})
        norm = nn.utils.clip_grad_norm_(parameters, task.max_grad_norm or math.inf)
        result.losses.append(loss)
        result.logprobs.append(logprobs)
        result.grad_norms.append(float(norm))
        result.learning_rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result.adapter.update({name: _weights(module) for name, module in modules.items()})
    return result


def _accumulate(
    tuned: PeftModel, task: ReferenceTask, batch: Sequence[TokenSequence], layout: _Layout
) -> tuple[float, list[torch.Tensor]]:
    """Forward and backward of one optimizer batch, in passes of `micro_batch` sequences."""
    denominator = sum(sequence.trained_tokens for sequence in batch)
    per_pass = task.micro_batch or len(batch)
    total, logprobs = 0.0, []
    for first in range(0, len(batch), per_pass):
        part = batch[first : first + per_pass]
        inputs = pad(part, task.padding, layout)
        output = tuned(**inputs, num_items_in_batch=denominator, use_cache=False)
        output.loss.backward()
        total += float(output.loss.detach())
        logprobs += _logprobs(output.logits.detach(), part, layout)
    return total, logprobs


def pad(part: Sequence[TokenSequence], side: Literal["right", "left"], layout: _Layout) -> dict[str, torch.Tensor]:
    """One padded batch [B, L] as a user would make it, with labels; notes in `layout` where each sequence lies."""
    width = max(len(sequence) for sequence in part)
    starts = [0 if side == "right" else width - len(sequence) for sequence in part]
    layout.examples, layout.starts, layout.width = part, starts, width
    ids_BL = torch.zeros(len(part), width, dtype=torch.long)
    attended_BL, positions_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
    labels_BL = torch.full_like(ids_BL, IGNORED)
    for row, (sequence, start) in enumerate(zip(part, starts, strict=True)):
        span = slice(start, start + len(sequence))
        ids_T = torch.from_numpy(sequence.ids.astype("int64"))
        ids_BL[row, span] = ids_T
        attended_BL[row, span] = 1
        positions_BL[row, span] = torch.arange(len(sequence))
        labels_BL[row, span] = torch.where(torch.from_numpy(sequence.mask.copy()), ids_T, IGNORED)
    inputs = {"input_ids": ids_BL, "attention_mask": attended_BL, "labels": labels_BL}
    # On the right, every model's own default is right and is what users rely on.
    return inputs if side == "right" else inputs | {"position_ids": positions_BL}


def _logprobs(logits_BLV: torch.Tensor, part: Sequence[TokenSequence], layout: _Layout) -> list[torch.Tensor]:
    gathered = []
    for row, (sequence, start) in enumerate(zip(part, layout.starts, strict=True)):
        scores_TV = logits_BLV[row, start : start + len(sequence)].float().log_softmax(-1)
        targets_T = torch.from_numpy(sequence.ids.astype("int64"))[1:]
        logprobs_T = torch.zeros(len(sequence), dtype=scores_TV.dtype)
        logprobs_T[1:] = scores_TV[:-1].gather(-1, targets_T[:, None])[:, 0]
        gathered.append(logprobs_T)
    return gathered


def _lora_config(model: PreTrainedModel, task: ReferenceTask) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=task.r,
        lora_alpha=task.lora_alpha,
        lora_dropout=task.lora_dropout,
        target_modules=task.targets if isinstance(task.targets, str) else list(task.targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )


def lora_modules(tuned: PeftModel) -> dict[str, LoraLayer]:
    """peft's LoRA layers by their name in the bare backbone."""
    backbone = tuned.base_model.model
    return {name: module for name, module in backbone.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def _start_from(module: LoraLayer, pair: LoraPair) -> None:
    module.lora_A[ADAPTER].weight.copy_(pair.a_RI)
    module.lora_B[ADAPTER].weight.copy_(pair.b_OR)


def _weights(module: LoraLayer) -> LoraPair:
    return LoraPair(module.lora_A[ADAPTER].weight.detach().clone(), module.lora_B[ADAPTER].weight.detach().clone())


def _gradients(module: LoraLayer) -> LoraPair:
    return LoraPair(module.lora_A[ADAPTER].weight.grad.clone(), module.lora_B[ADAPTER].weight.grad.clone())


def random_lora(
    model: PreTrainedModel, *, r: int, seed: int, targets: Sequence[str] | Literal["all-linear"] = "all-linear"
) -> dict[str, LoraPair]:
    """LoRA matrices for every targeted linear layer, fp32, by module name. B is not zero, so that step 1 already has a
    gradient in A; "all-linear" leaves out the output head, as peft does."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    pairs = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        wanted = module is not head if targets == "all-linear" else name.rpartition(".")[2] in targets
        if wanted:
            inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
            a_RI = torch.randn(r, inputs, generator=generator) / math.sqrt(inputs)
            b_OR = torch.randn(outputs, r, generator=generator) * 0.1
            pairs[name] = LoraPair(a_RI, b_OR)
    return pairs


def relative_difference(ours: LoraTensors, theirs: LoraTensors) -> float:
    """|ours - theirs| / |theirs| over all matrices together, in fp64."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    difference = norm = 0.0
    for name, pair in theirs.items():
        for mine, other in zip(ours[name], pair, strict=True):
            difference += float((mine.double() - other.double()).square().sum())
            norm += float(other.double().square().sum())
    return math.sqrt(difference / norm)
