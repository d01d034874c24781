"""The same tasks trained on one device and on a rank of several; what there is to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Sequences
from muxtune.models import attention
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.sources import ModelFolder
from muxtune.models.weights import load_model
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.pipe import Mesh, make_mesh
from muxtune.parallel.stage import load_stage
from muxtune.parallel.tensor import load_sharded
from tests.engine.build import CPU, by_task, exact
from tests.engine.pairs import PairTrial
from tests.engine.prompts import PeftTrial


@dataclass(frozen=True, slots=True)
class Options:
    """Of an engine."""

    plain: bool = False
    recompute: bool = False
    together: int = 1
    overlap: bool = True
    fuse_tokens: int = 2048
    keep_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task came to: its first gradient, the numbers of its steps, and the whole adapter at the end.

    `accuracies` are those that can be compared: a dpo task's first step has none, for where the policy is still the
    reference every margin is 0 but for rounding, which says who is preferred.
    """

    gradient: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    accuracies: list[float]
    state: dict[str, Tensor]


def folder_of(path: Path) -> ModelFolder:
    return ModelFolder(str(path), path, str(path), "", path)


def on_one(path: Path, trials: Sequence[PeftTrial | PairTrial], options: Options) -> dict[str, Outcome]:
    """On one device."""
    attention.register()
    model = load_model(folder_of(path), dtype=torch.float64, device="cpu", attn_implementation="eager")
    return _outcomes(Backbone(model, "transformers"), trials, options)


def on_rank(
    axis: TensorAxis, path: Path, trials: Sequence[PeftTrial | PairTrial], options: Options
) -> dict[str, Outcome]:
    """On this rank, which all others do too."""
    backbone = load_sharded(path, axis, dtype=torch.float64, device=CPU)
    return _outcomes(backbone, trials, options)


@cache
def mesh_of(axis: TensorAxis, tp: int, pp: int) -> Mesh:
    """A rank's place among tp x pp; made once by all of them."""
    return make_mesh(axis, tp=tp, pp=pp, timeout_s=60)


def on_stage(
    axis: TensorAxis,
    path: Path,
    trials: Sequence[PeftTrial | PairTrial],
    options: Options,
    tp: int = 1,
    block: BlockChoice = "transformers",
) -> dict[str, Outcome]:
    """On this rank of a pipeline, all others of which do the same."""
    mesh = mesh_of(axis, tp, axis.size // tp)
    backbone = load_stage(path, mesh, dtype=torch.float64, device=CPU, block=block)
    return _outcomes(backbone, trials, options)


def _outcomes(backbone: Backbone, trials: Sequence[PeftTrial | PairTrial], options: Options) -> dict[str, Outcome]:
    with exact(torch.float64):
        engine = Engine(
            backbone,
            plain=options.plain,
            recompute=options.recompute,
            together=options.together,
            overlap=options.overlap,
            fuse_tokens=options.fuse_tokens,
            keep_tokens=options.keep_tokens,
        )
        for trial in trials:
            engine.attach(trial.job, Sequences(trial.examples), chunk_tokens=trial.chunk_tokens)
        firsts = {trial.name: trial.examples[: trial.batch * trial.job.group_size] for trial in trials}
        engine.forward_backward(firsts)
        gradients = {name: _gradient(engine, name) for name in engine.tasks}
        for task in engine.tasks.values():
            task.drop_pending()
        steps = by_task(engine, list(Runner(engine).run()))
        return {
            name: Outcome(
                gradients[name],
                [step.loss for step in own],
                [step.grad_norm for step in own],
                [step.accuracy for step in own[engine.tasks[name].job.method == "dpo" :]],
                _state(engine, name),
            )
            for name, own in steps.items()
        }


def _gradient(engine: Engine, name: str) -> dict[str, Tensor]:
    if name in engine.sharded:
        return engine.sharded[name].whole_gradient()
    views = engine.tasks[name].adapter.parameters.views
    return {key: view.grad.clone() for key, view in views.items() if view.grad is not None}


def _state(engine: Engine, name: str) -> dict[str, Tensor]:
    if name in engine.sharded:
        return engine.sharded[name].whole_state()
    return engine.tasks[name].adapter.state()


def assert_equal(one: Outcome, other: Outcome, tolerance: float) -> None:
    """All numbers within `tolerance`, absolutely."""
    assert len(one.losses) == len(other.losses) > 0
    assert one.accuracies == other.accuracies
    for mine, theirs in ((one.losses, other.losses), (one.norms, other.norms)):
        assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= tolerance
    for mine_by_name, theirs_by_name in ((one.gradient, other.gradient), (one.state, other.state)):
        assert mine_by_name.keys() == theirs_by_name.keys()
        for name, value in mine_by_name.items():
            assert value.shape == theirs_by_name[name].shape, name
            assert float((value - theirs_by_name[name]).abs().max()) <= tolerance, name
