"""What `check_gpu` checks on one model, device and dtype: each check a figure, and what is allowed.

Gradients of one step are compared over whole adapters, |ours - exact| / |exact|. The yardstick is transformers + peft
on the same device: *exact* is its gradient in fp64 (for fp32) or fp32 (for bf16), and our error may be at most three
times the error that transformers + peft itself makes in the dtype under test. Our runs may differ from one another -
fused against alone, fast against plain, resumed against undisturbed - by as much, and are bit-equal on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.baselines import Matrices, Recipe, adapter_matrices, initial_matrices, pad, task_by_task
from benchmarks.loads import Load, non_uniform
from benchmarks.race import LOSS_TOLERANCE, loss_gap
from benchmarks.sides import EngineSide, engine_side
from muxtune.engine.load import DTypeName, load_backbone
from muxtune.engine.sampling import Request, generate
from muxtune.models.backbone import Backbone
from muxtune.models.loading import reading
from muxtune.models.sources import ModelFolder
from muxtune.models.weights import weights_hash
from muxtune.peft.dropout import keep_mask, row_keys
from muxtune.plan.types import MicroBatch, RoundSchedule

STEPS = 4
EXACT = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
TIMES_PEFT = 3.0  # our error over that of transformers + peft
DROPOUT = 0.1
RECIPE = Recipe(learning_rate=2e-3)

Gradients = list[Tensor]  # of each task, all matrices flat, fp64 on the CPU


@dataclass(frozen=True, slots=True)
class Subject:
    """What is under test."""

    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype

    def backbone(self) -> Backbone:
        """Loaded as a user's is."""
        dtype: DTypeName = "fp32" if self.dtype is torch.float32 else "bf16"
        return load_backbone(self.folder, device=str(self.device), dtype=dtype)


@dataclass(frozen=True, slots=True)
class Check:
    """One outcome; `detail` says the figure and what was allowed, or why it was left out (None)."""

    name: str
    passed: bool | None
    detail: str


def checks(subject: Subject) -> Iterator[Check]:
    """Every check, in order; the first measures what the next three are allowed."""
    backbone = subject.backbone()
    before = weights_hash(backbone.model)
    load = non_uniform(STEPS, vocab=backbone.vocabulary, micro_batch=2)
    init = _start(subject)
    exact = _peft_gradients(_plain_model(subject, EXACT[subject.dtype]), load, init)
    allowed = TIMES_PEFT * _gap(_peft_gradients(_plain_model(subject, subject.dtype), load, init), exact)
    ours = _gradients(engine_side(backbone, load, RECIPE, init))
    yield _within("gradients against transformers + peft", _gap(ours, exact), allowed)
    plain = _gradients(engine_side(backbone, load, RECIPE, init, plain=True))
    yield _within("fast paths against their plain twins", _gap(ours, plain), allowed)
    yield from _together(backbone, load, init, allowed)
    yield _resumed(backbone, load, init)
    yield _trains(backbone, load, init)
    yield _dropout(subject.device)
    yield _decodes(backbone, _plain_model(subject, subject.dtype))
    yield Check("backbone untouched", weights_hash(backbone.model) == before, "SHA-256 of its weights")
    yield Check("row invariance", True, "holds" if engine_side(backbone, load, RECIPE).engine.row_invariant else "no")


def _within(name: str, figure: float, allowed: float) -> Check:
    return Check(name, figure <= allowed, f"{figure:.1e} apart, {allowed:.1e} allowed")


def _together(backbone: Backbone, load: Load, init: Matrices, allowed: float) -> Iterator[Check]:
    """The same tasks in one pass and each in passes of its own, with and without dropout."""
    for dropout in (0.0, DROPOUT):
        fused, alone = (
            _gradients(engine_side(backbone, load, RECIPE, init, policy=policy, dropout=dropout))
            for policy in ("fuse-all", "sequential")
        )
        equal = sum(torch.equal(one, other) for one, other in zip(fused, alone, strict=True))
        check = _within(f"together against alone, dropout {dropout:g}", _gap(fused, alone), allowed)
        yield Check(check.name, check.passed, f"{check.detail}; {equal} of {len(fused)} tasks bit-equal")


def _resumed(backbone: Backbone, load: Load, init: Matrices) -> Check:
    """Half the steps, state moved to a fresh engine as a checkpoint would, the other half."""
    whole, first, second = (engine_side(backbone, load, RECIPE, init) for _ in range(3))
    run(whole, range(STEPS))
    run(first, range(STEPS // 2))
    for old, new in zip(first.tasks, second.tasks, strict=True):
        new.adapter.parameters.load(old.adapter.parameters.export())
        new.optimizer.load_moments(old.optimizer.moments(), old.step)
        new.step = old.step
    run(second, range(STEPS // 2, STEPS))
    gap = loss_gap([[losses[-1] for losses in side.losses] for side in (whole, second)])
    return _within("resumed against undisturbed, last losses", gap, LOSS_TOLERANCE[backbone.dtype])


def _trains(backbone: Backbone, load: Load, init: Matrices) -> Check:
    """One batch again and again: the loss of every task must fall, and stay a number."""
    again = Load("again", tuple((batches[0],) * STEPS for batches in load.tasks))
    side = engine_side(backbone, again, RECIPE, init)
    run(side, range(STEPS))
    fell = sum(losses[-1] < losses[0] for losses in side.losses)  # false for NaN
    first, last = (float(np.mean([losses[at] for losses in side.losses])) for at in (0, -1))
    return Check("training", fell == len(side.losses), f"mean loss {first:.3f} to {last:.3f}, fell in {fell} tasks")


def _dropout(device: torch.device) -> Check:
    """Masks are integer arithmetic: the same bits everywhere."""
    place = np.arange(37)
    here, there = (
        keep_mask(row_keys(7, 3, place + 2**40, place, one), "layer.q_proj", 129, DROPOUT).cpu()
        for one in (torch.device("cpu"), device)
    )
    return Check("dropout masks as on the CPU", torch.equal(here, there), f"keep {float(there.double().mean()):.3f}")


@torch.no_grad()
def _decodes(backbone: Backbone, model: PreTrainedModel) -> Check:
    """Greedy decoding with a cache picks what transformers, without one, finds likeliest, or nearly."""
    side = engine_side(backbone, non_uniform(1, vocab=backbone.vocabulary, micro_batch=1), RECIPE)
    prompts = [task.data.train[0].ids[:9].tolist() for task in side.tasks[:3]]
    requests = [Request(None, prompt, frozenset(), max_new_tokens=8) for prompt in prompts]
    short = 0.0
    for prompt, new_ids in zip(prompts, generate(side.engine, requests), strict=True):
        ids_1T = torch.tensor([[*prompt, *new_ids]], device=model.device)
        logits_SV = model(ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen_S = logits_SV.gather(1, ids_1T[0, len(prompt) :, None])[:, 0]
        short = max(short, float(((logits_SV.amax(1) - chosen_S) / logits_SV.abs().amax(1)).max()))
    return Check("decoding", short < 1e-2, f"chosen logits at most {short:.1e} of their size below the largest")


def run(side: EngineSide, steps: range) -> None:
    """Those steps of every task."""
    for step in steps:
        side.step(step)


def _start(subject: Subject) -> Matrices:
    """peft's start, but B random: from zero, A would have no gradient to compare."""
    generator = torch.Generator().manual_seed(1)
    started = initial_matrices(_plain_model(subject, torch.float32), RECIPE).items()
    return {
        name: (a_RI, 0.02 * torch.randn(b_OR.shape, generator=generator).to(b_OR)) for name, (a_RI, b_OR) in started
    }


def _plain_model(subject: Subject, dtype: torch.dtype) -> PreTrainedModel:
    with reading("the model", subject.folder.path):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(subject.folder.path, dtype=dtype)
        return model.to(subject.device)


def _peft_gradients(model: PreTrainedModel, load: Load, init: Matrices) -> Gradients:
    side = task_by_task(model, load, RECIPE, init)
    for run, batches in zip(side.runs, load.tasks, strict=True):
        inputs = {name: tensor.to(model.device) for name, tensor in pad(batches[0]).items()}
        run.model(**inputs, use_cache=False).loss.backward()
    return [_flat([(pair[0].grad, pair[1].grad) for pair in adapter_matrices(run).values()]) for run in side.runs]


def _gradients(side: EngineSide) -> Gradients:
    """Of the first step, which is not applied."""
    schedule = side.engine.schedule([task.participant() for task in side.tasks])
    passes = tuple(action for action in schedule.actions if isinstance(action, MicroBatch))
    side.engine.execute(RoundSchedule(schedule.round, passes))
    return [
        _flat([(views[f"{name}.lora_A"].grad, views[f"{name}.lora_B"].grad) for name in task.adapter.modules])
        for task in side.tasks
        for views in [task.adapter.parameters.views]
    ]


def _flat(pairs: Iterable[tuple[Tensor | None, ...]]) -> Tensor:
    parts = [matrix.double().flatten().cpu() for pair in pairs for matrix in pair if matrix is not None]
    return torch.cat(parts)


def _gap(ours: Gradients, exact: Gradients) -> float:
    """The worst task's relative difference."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ours, exact, strict=True))
