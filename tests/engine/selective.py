"""Tasks of bottleneck adapters and of the selective types - BitFit, norm tuning, SHiRA - and their plain twins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.peft.base import Adapter
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import BitFit, Bottleneck, LnTuning, Lora, PeftBase, Shira
from tests import reference_types
from tests.engine.build import CPU, backbone_of, exact, run
from tests.engine.prompts import PeftTrial
from tests.reference_types import Plain, PlainResult, train_plain
from tests.tiny import tiny_model

ARCHS = ("llama", "gpt2", "opt")

# Linears of each family, and its norms.
LINEARS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_fc", "c_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
NORMS = {
    "llama": ("input_layernorm", "post_attention_layernorm", "norm"),
    "gpt2": ("ln_1", "ln_2", "ln_f"),
    "opt": ("self_attn_layer_norm", "final_layer_norm"),
}
SOME = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn", "mlp.c_proj"), "opt": ("v_proj", "fc1")}
ONE_NORM = {"llama": ("layers.1.input_layernorm",), "gpt2": ("h.1.ln_2",), "opt": ("layers.0.final_layer_norm",)}


def trials(arch: str) -> tuple[PeftTrial, ...]:
    """Tasks that differ in all that tasks of these types may. Weight decay stands in where both sides decay alike: a
    bias trained itself decays to zero, ours to the backbone's."""
    serial = Bottleneck(placement="houlsby", bottleneck_size=5, non_linearity="gelu", scaling=0.5)
    beside = Bottleneck(placement="parallel", bottleneck_size=8, non_linearity="swish", scaling=4)
    made = [
        PeftTrial("houlsby", serial, [3, 20, 7, 12] * 2, weight_decay=0.1, seed=1),
        PeftTrial("pfeiffer", Bottleneck(), [10, 25, 13, 4], batch=2, steps=4, max_grad_norm=0.05, seed=2),
        PeftTrial("tanh", Bottleneck(reduction_factor=3.5, non_linearity="tanh"), [9, 31], batch=1, steps=2, seed=3),
        PeftTrial("bitfit", BitFit(), [6, 18, 2, 9, 5], batch=3, seed=4),
        PeftTrial("norms", LnTuning(), [5, 30, 11], batch=3, weight_decay=0.1, seed=5, chunk_tokens=40),
        PeftTrial("one-norm", LnTuning(target_modules=ONE_NORM[arch]), [14, 8], batch=2, steps=2, seed=6),
        PeftTrial("shira", Shira(r=2), [8, 8, 17, 3], weight_decay=0.1, batch=2, steps=4, seed=7),
        PeftTrial("few-places", Shira(r=1, target_modules=SOME[arch]), [40, 3], batch=2, seed=8, chunk_tokens=24),
    ]
    if arch in reference_types.MLP:
        made.append(PeftTrial("parallel", beside, [7, 22, 15, 4], batch=2, max_grad_norm=0.05, seed=9))
    return tuple(made)


BESIDE = (PeftTrial("drop", Lora(r=3, lora_dropout=0.3), [10, 31, 2], batch=1, steps=4, seed=10, chunk_tokens=48),)


@dataclass(frozen=True, slots=True)
class Result:
    """What a task came to: copies. `start` and `values` are the adapter's parameters by name."""

    losses: list[float]
    grad_norms: list[float]
    start: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def start_of(backbone: Backbone, trial: PeftTrial) -> Adapter:
    """The trial's adapter a little off its start, so that the first step has a gradient everywhere; fp32 draws."""
    adapter = build_adapter(trial.peft, backbone, seed=trial.seed, dtype=backbone.dtype, device=CPU)
    generator = torch.Generator().manual_seed(trial.seed)
    with torch.no_grad():
        for view in adapter.parameters.views.values():
            view += 0.1 * torch.randn(view.shape, generator=generator).to(view)
    return adapter


def attach(engine: Engine, trial: PeftTrial) -> Task:
    task = engine.attach(trial.job, Sequences(trial.examples), chunk_tokens=trial.chunk_tokens)
    task.adapter.load(start_of(engine.backbone, trial).state())
    return task


def train(backbone: Backbone, tasks: Sequence[PeftTrial], **options: object) -> dict[str, Result]:
    """Train the tasks together, on an engine of their own."""
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        attached = [attach(engine, trial) for trial in tasks]
        starts = {task.name: task.adapter.parameters.export() for task in attached}
        steps = run(engine)
    return {
        task.name: Result(
            [step.loss for step in steps[task.name]],
            [step.grad_norm for step in steps[task.name]],
            starts[task.name],
            task.adapter.parameters.export(),
            dict(task.optimizer.moments()),
        )
        for task in attached
    }


def plain_of(arch: str, trial: PeftTrial, dtype: torch.dtype, start: Adapter) -> Plain:
    """The trial's method in a plain model of its own, with these start values."""
    model = tiny_model(arch, dtype=dtype)
    plain = _method(model, arch, trial.peft, start)
    plain.load({name: view.detach() for name, view in start.parameters.views.items()})
    return plain


def _method(model: object, arch: str, spec: PeftBase, start: Adapter) -> Plain:
    if isinstance(spec, Bottleneck):
        return reference_types.bottleneck(model, arch, spec)
    if isinstance(spec, BitFit):  # LLaMA has no bias, which is what peft's BEFT is for
        return reference_types.beft(model, LINEARS[arch]) if arch == "llama" else reference_types.biases(model)
    if isinstance(spec, LnTuning):
        targets = NORMS[arch] if spec.target_modules == "all-norms" else spec.target_modules
        return reference_types.ln_tuning(model, targets)
    assert isinstance(spec, Shira)
    places = {name.removesuffix(".shira_indices"): places_2P for name, places_2P in start.fixed.items()}
    if arch == "gpt2":  # whose Conv1D peft does not take
        return reference_types.sparse(model, places)
    targets = LINEARS[arch] if spec.target_modules == "all-linear" else spec.target_modules
    return reference_types.shira(model, targets, spec.r, places)


def reference(arch: str, trial: PeftTrial, dtype: torch.dtype) -> PlainResult:
    """The trial as its plain twin trains it."""
    plain = plain_of(arch, trial, dtype, start_of(backbone_of(arch, dtype), trial))
    with exact(dtype):
        return train_plain(
            plain,
            trial.batches,
            learning_rate=trial.learning_rate,
            weight_decay=trial.weight_decay,
            max_grad_norm=trial.max_grad_norm,
        )


def relative(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors together, in fp64; peft may keep a row where we keep a vector."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    mine = torch.cat([ours[name].double().flatten() for name in theirs])
    other = torch.cat([value.double().flatten() for value in theirs.values()])
    return float((mine - other).norm() / other.norm())
