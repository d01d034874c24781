"""The other side: N LoRA tasks with transformers + peft, as a user would write it.

*Task by task* is N separate runs: each has a PeftModel of its own (they share the backbone's tensors here, which
changes no time, so that eight fit in memory), padded batches, labels, torch's AdamW, clipping and a linear schedule.
*One process, many adapters* is peft's multi-adapter API on one model: `add_adapter`, then `set_adapter` before each
task's step. Both train the same sequences from the same adapter weights in the same dtype with the same threads as
our sides; `optimizer` chooses among torch's AdamW implementations.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, get_scheduler

from benchmarks.loads import Batch, Load

OptimizerKind = Literal["default", "foreach", "fused"]
Matrices = Mapping[str, tuple[Tensor, Tensor]]  # module of the bare backbone -> (A [r, in], B [out, r])

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every task of the benchmark trains with, on every side."""

    r: int = 8
    lora_alpha: int = 16
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    schedule_steps: int = 100
    optimizer: OptimizerKind = "default"


class Side(Protocol):
    """One contestant. `step(s)` trains step s of every task; `losses[t]` collects task t's loss of each step."""

    losses: list[list[float]]

    def step(self, index: int) -> None: ...


@dataclass(slots=True)
class Run:
    """One task: its model, its optimizer, its schedule."""

    model: PeftModel
    adapter: str
    optimizer: AdamW
    scheduler: LRScheduler
    parameters: list[Tensor]


@dataclass(slots=True)
class PeftSide:
    """transformers + peft on a load. With `switch`, all runs share one model and `set_adapter` picks the task."""

    load: Load
    recipe: Recipe
    runs: list[Run]
    switch: bool
    losses: list[list[float]] = field(default_factory=list)

    def step(self, index: int) -> None:
        for task, run in enumerate(self.runs):
            if self.switch:
                run.model.set_adapter(run.adapter)
            self.losses[task].append(self._train(run, self.load.tasks[task][index]))

    def _train(self, run: Run, batch: Batch) -> float:
        inputs = {name: tensor.to(run.model.device) for name, tensor in pad(batch).items()}
        loss: Tensor = run.model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.parameters, self.recipe.max_grad_norm)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
        return float(loss.detach())


def task_by_task(model: PreTrainedModel, load: Load, recipe: Recipe, init: Matrices) -> PeftSide:
    """N separate runs, one after the other."""
    runs = []
    for _ in load.tasks:
        tuned = get_peft_model(_sharing_tensors(model), _lora(recipe))
        runs.append(_run(tuned, "default", recipe, init))
    return PeftSide(load, recipe, runs, switch=False, losses=[[] for _ in runs])


def many_adapters(model: PreTrainedModel, load: Load, recipe: Recipe, init: Matrices) -> PeftSide:
    """One process with peft's multi-adapter API."""
    names = [f"task{number}" for number in range(len(load.tasks))]
    tuned = get_peft_model(_sharing_tensors(model), _lora(recipe), adapter_name=names[0])
    for name in names[1:]:
        tuned.add_adapter(name, _lora(recipe))
    runs = [_run(tuned, name, recipe, init) for name in names]
    return PeftSide(load, recipe, runs, switch=True, losses=[[] for _ in runs])


def initial_matrices(model: PreTrainedModel, recipe: Recipe, *, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """peft's own start (A Kaiming-uniform, B zero), drawn once so that every side has the same."""
    torch.manual_seed(seed)
    tuned = get_peft_model(_sharing_tensors(model), _lora(recipe))
    return {
        name: (module.lora_A["default"].weight.detach().clone(), module.lora_B["default"].weight.detach().clone())
        for name, module in _layers(tuned).items()
    }


def adapter_matrices(run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """A run's live matrices by module of the bare backbone; after a backward pass each has its gradient."""
    adapter = run.adapter
    layers = _layers(run.model).items()
    return {name: (module.lora_A[adapter].weight, module.lora_B[adapter].weight) for name, module in layers}


def pad(batch: Batch) -> dict[str, Tensor]:
    """Right-padded ids, attention mask and labels, [B, longest]."""
    width = max(map(len, batch))
    ids_BL = torch.zeros(len(batch), width, dtype=torch.long)
    attended_BL, labels_BL = torch.zeros_like(ids_BL), torch.full_like(ids_BL, IGNORED)
    for row, sequence in enumerate(batch):
        ids_T = torch.from_numpy(sequence.ids).long()
        ids_BL[row, : len(ids_T)] = ids_T
        attended_BL[row, : len(ids_T)] = 1
        labels_BL[row, : len(ids_T)] = torch.where(torch.from_numpy(sequence.mask), ids_T, IGNORED)
    return {"input_ids": ids_BL, "attention_mask": attended_BL, "labels": labels_BL}


def _run(tuned: PeftModel, adapter: str, recipe: Recipe, init: Matrices) -> Run:
    tuned.set_adapter(adapter)
    tuned.train()
    for name, module in _layers(tuned).items():
        a_RI, b_OR = init[name]
        module.lora_A[adapter].weight.data.copy_(a_RI)
        module.lora_B[adapter].weight.data.copy_(b_OR)
    parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = AdamW(
        parameters,
        lr=recipe.learning_rate,
        weight_decay=0.0,
        foreach=True if recipe.optimizer == "foreach" else None,
        fused=True if recipe.optimizer == "fused" else None,
    )
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=recipe.schedule_steps)
    return Run(tuned, adapter, optimizer, scheduler, parameters)


def _layers(tuned: PeftModel) -> dict[str, LoraLayer]:
    named = tuned.base_model.model.named_modules()
    return {name: module for name, module in named if isinstance(module, LoraLayer)}


def _lora(recipe: Recipe) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=recipe.r, lora_alpha=recipe.lora_alpha, target_modules="all-linear")


def _sharing_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree over the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
