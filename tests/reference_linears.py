"""The yardstick for types at linears: one task of LoRA's kin, or IA3, with transformers, peft and torch's AdamW.

As in `tests.reference`, whose padded batches, loss and injected dropout these are, but for any config of peft whose
parameters can be told by name. A PiSSA is peft's own too: a LoRA beside the residual weight, here in the model's
precision (peft makes it in fp32 alone; `tests.peft.test_pissa` compares with that).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler
from transformers.pytorch_utils import Conv1D

from muxtune.data.types import TokenSequence
from muxtune.spec.peft import IA3, Lora, PeftBase
from tests.reference import ADAPTER, DropoutMask, _InjectedDropout, _Layout, lora_modules, pad

Start = Mapping[str, Tensor]  # by the name that the engine gives a parameter


@dataclass(frozen=True, slots=True)
class LinearTask:
    """`start`: every trained value, and of a PiSSA also where its pair started (`NAME.start_A`, `NAME.start_B`)."""

    peft: PeftBase
    batches: Sequence[Sequence[TokenSequence]]
    start: Start
    learning_rate: float
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dropout_mask: DropoutMask | None = None


@dataclass(frozen=True, slots=True)
class LinearResult:
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, before clipping
    values: dict[str, Tensor] = field(default_factory=dict)


def train_linears(model: PreTrainedModel, task: LinearTask) -> LinearResult:
    """Train `task` on a copy of `model`."""
    model = copy.deepcopy(model)
    if isinstance(task.peft, Lora) and task.peft.pissa:
        _leave_residual(model, task.peft.scaling, task.start)
    tuned = get_peft_model(model, peft_config(task.peft, model, task.start)).eval()
    trained = named_parameters(tuned)
    assert trained.keys() == {name for name in task.start if ".start_" not in name}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(task.start[name].view_as(parameter))
    layout = _Layout()
    if isinstance(task.peft, Lora) and task.peft.lora_dropout > 0:
        assert task.dropout_mask is not None
        for name, module in lora_modules(tuned).items():
            drop = _InjectedDropout(name, task.peft.lora_dropout, task.dropout_mask, layout)
            module.train().lora_dropout[ADAPTER] = drop  # which peft's DoRA asks in training alone
    return train_steps(tuned, task, layout)


def train_steps(tuned: PeftModel, task: LinearTask, layout: _Layout | None = None) -> LinearResult:
    """Train peft's model in place, from where it stands, on the task's batches."""
    layout, trained = layout or _Layout(), named_parameters(tuned)
    parameters = list(trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=task.weight_decay)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(task.batches))
    result = LinearResult()
    for step, batch in enumerate(task.batches, start=1):
        layout.step = step
        denominator = sum(sequence.trained_tokens for sequence in batch)
        output = tuned(**pad(batch, "right", layout), num_items_in_batch=denominator, use_cache=False)
        output.loss.backward()
        if step == 1:
            result.gradients.update({name: _own(p.grad) for name, p in trained.items()})
        result.losses.append(float(output.loss.detach()))
        result.grad_norms.append(float(nn.utils.clip_grad_norm_(parameters, task.max_grad_norm or math.inf)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result.values.update({name: _own(parameter) for name, parameter in trained.items()})
    return result


def _own(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().clone()


def named_parameters(tuned: PeftModel) -> dict[str, nn.Parameter]:
    """What is trained, by the engine's names: `NAME.lora_A`, `NAME.lora_magnitude_vector`, `NAME.ia3_l`."""
    return {
        name.removeprefix("base_model.model.").replace(f".{ADAPTER}", "").removesuffix(".weight"): parameter
        for name, parameter in tuned.named_parameters()
        if parameter.requires_grad
    }


def peft_config(spec: PeftBase, model: PreTrainedModel, start: Start) -> PeftConfig:
    """The same settings in peft's words, at exactly the modules that `start` names."""
    modules = sorted({name.rpartition(".")[0] for name in start})
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in modules)
    if isinstance(spec, IA3):
        sizes = {name: model.get_submodule(name).weight.shape for name in modules}
        inputs = [name for name in modules if name.endswith(FEEDFORWARD)]
        assert inputs and all(start[f"{name}.ia3_l"].numel() in sizes[name] for name in modules)
        return IA3Config(
            task_type="CAUSAL_LM", target_modules=modules, feedforward_modules=inputs, fan_in_fan_out=transposed
        )
    assert isinstance(spec, Lora)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.r,
        lora_alpha=spec.lora_alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=modules,
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        fan_in_fan_out=transposed,
    )


FEEDFORWARD = ("mlp.down_proj", "mlp.c_proj", "fc2")  # whose input IA3 scales, by peft's own table of families


@torch.no_grad()
def _leave_residual(model: PreTrainedModel, scale: float, start: Start) -> None:
    for name in {key.rpartition(".")[0] for key in start}:
        module = model.get_submodule(name)
        principal_OI = scale * start[f"{name}.start_B"] @ start[f"{name}.start_A"]
        module.weight.sub_(principal_OI.T if isinstance(module, Conv1D) else principal_OI)


def relative_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors together, in fp64."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    flat = partial(torch.cat, dim=0)
    names = sorted(theirs)
    mine = flat([ours[name].double().flatten() for name in names])
    other = flat([theirs[name].double().flatten() for name in names])
    return float((mine - other).norm() / other.norm())
