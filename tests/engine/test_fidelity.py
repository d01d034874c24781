"""Each task of a batch comes out as it would alone, and as transformers + peft + AdamW would have trained it.

Four tasks that differ in rank, targets, dropout, lengths, batch, chunks and schedule train together on each family. The
first test asks for the same bits as alone; the probe must hold for that, and here it must. The others ask for the
yardstick's numbers: in fp64 to 1e-9, in fp32 within three times its own error against fp64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.models.backbone import Backbone
from tests.engine.build import (
    Trained,
    Trial,
    assert_same_bits,
    attach,
    backbone_of,
    exact,
    gradients_of,
    mixed_trials,
    reference,
    run,
    start_values,
    train,
)
from tests.reference import LoraPair, LoraTensors, ReferenceResult, relative_difference
from tests.sequences import random_sequences
from tests.tiny import SUPPORTED

DTYPES = (torch.float32, torch.float64)
TRIALS = ("all", "drop", "short", "last")


@cache
def _together(arch: str, dtype: torch.dtype) -> dict[str, Trained]:
    return train(backbone_of(arch, dtype), mixed_trials(arch))


@cache
def _reference(arch: str, name: str, dtype: torch.dtype) -> ReferenceResult:
    return reference(arch, _trial(arch, name), dtype)


def _trial(arch: str, name: str) -> Trial:
    return next(trial for trial in mixed_trials(arch) if trial.name == name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_trained_together_is_trained_alone_bit_for_bit(arch: str, dtype: torch.dtype) -> None:
    backbone = backbone_of(arch, dtype)
    assert Engine(backbone).row_invariant, "this machine's GEMMs are expected to be row-invariant"
    for trial in mixed_trials(arch):
        together = _together(arch, dtype)[trial.name]
        assert_same_bits(together, train(backbone, [trial])[trial.name])
        assert relative_difference(together.pairs, start_values(backbone, trial)) > 1e-3, "nothing was trained"


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_in_fp64_it_is_what_transformers_and_peft_train(arch: str, name: str) -> None:
    ours, theirs = _together(arch, torch.float64)[name], _reference(arch, name, torch.float64)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-9)
    assert ours.learning_rates == pytest.approx(theirs.learning_rates, rel=1e-15)
    assert relative_difference(ours.pairs, theirs.adapter) < 1e-9


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_in_fp32_it_errs_no_more_than_three_times_what_transformers_and_peft_do(arch: str, name: str) -> None:
    """Floors: a loss of one fp32 rounding may be exact by luck on the other side. Weights move by the learning rate in
    a direction that rounding decides wherever AdamW meets a gradient of nearly zero: those are left out."""
    ours, theirs = _together(arch, torch.float32)[name], _reference(arch, name, torch.float32)
    truth = _reference(arch, name, torch.float64)
    assert _worst(ours.losses, truth.losses) < max(3 * _worst(theirs.losses, truth.losses), 1e-6)
    own, their, true = (_decided(pairs, truth.gradients) for pairs in (ours.pairs, theirs.adapter, truth.adapter))
    assert relative_difference(own, true) < max(3 * relative_difference(their, true), 2e-5)


def _decided(pairs: LoraTensors, gradients: LoraTensors) -> dict[str, LoraPair]:
    """Zero where the first gradient is less than fp32 can tell from zero, beside the largest of its matrix."""

    def kept(values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return values.double() * (gradient.abs() > 1e-5 * gradient.abs().max())

    return {name: LoraPair(*map(kept, pair, gradients[name])) for name, pair in pairs.items()}


@pytest.mark.parametrize("arch", SUPPORTED)
def test_first_gradients_in_fp32_err_no_more_than_three_times_what_peft_does(arch: str) -> None:
    for name, ours in _first_gradients(arch, torch.float32).items():
        theirs, truth = _reference(arch, name, torch.float32), _reference(arch, name, torch.float64)
        error = relative_difference(ours, truth.gradients)
        assert error < max(3 * relative_difference(theirs.gradients, truth.gradients), 3e-7)


@pytest.mark.parametrize("arch", ["llama-mqa", "gemma2", "gpt2"])
def test_first_gradients_in_fp64_are_those_of_transformers_and_peft(arch: str) -> None:
    for name, ours in _first_gradients(arch, torch.float64).items():
        assert relative_difference(ours, _reference(arch, name, torch.float64).gradients) < 1e-12


@cache
def _first_gradients(arch: str, dtype: torch.dtype) -> dict[str, dict[str, LoraPair]]:
    """By task and attach point, of every task's first batch, all in one pass."""
    with exact(dtype):
        engine = Engine(backbone_of(arch, dtype))
        tasks = {trial.name: attach(engine, trial) for trial in mixed_trials(arch)}
        engine.forward_backward(
            {key: [task.data.train[index] for index in task.sampler.batch(0)] for key, task in tasks.items()}
        )
    return {name: gradients_of(task) for name, task in tasks.items()}


def _worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("schedule", "max_grad_norm"),
    [
        ("linear", 0.1),
        ("linear", 0.0),
        ("cosine", 0.1),
        ("constant", 0.1),
        ("constant_with_warmup", 0.1),
        ("inverse_sqrt", 0.1),
    ],
)
def test_schedules_decay_and_clipping_are_those_of_transformers(schedule: str, max_grad_norm: float) -> None:
    trial = Trial(
        "only", [5, 9, 14, 3, 8], steps=5, schedule=schedule, warmup_steps=0 if schedule == "constant" else 2,
        weight_decay=0.2, max_grad_norm=max_grad_norm,
    )  # fmt: skip
    ours = train(backbone_of("llama", torch.float64), [trial])["only"]
    theirs = reference("llama", trial, torch.float64)
    assert ours.learning_rates == pytest.approx(theirs.learning_rates, rel=1e-12)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-9)
    assert min(ours.grad_norms) > 0.1, "clipping never came in"
    assert relative_difference(ours.pairs, theirs.adapter) < 1e-9


def test_the_seed_alone_makes_the_adapter() -> None:
    """reports.md 29: the same job twice, and after others, is one adapter, from its start values on; with its own
    order of examples and its own dropout. Another seed is another adapter."""
    job = Trial("job", [4, 19, 8, 11, 6], batch=2, steps=5, dropout=0.2, shuffle=True, seed=5)
    others = [Trial(f"other-{seed}", [7, 15], batch=1, dropout=0.5, seed=seed) for seed in (1, 2)]
    backbone = backbone_of("qwen3")
    start, end = _from_seed(backbone, [job])
    for trials in ([job], [*others, job], [job, *others]):
        again_start, again_end = _from_seed(backbone, trials)
        assert torch.equal(start, again_start) and torch.equal(end, again_end)
    other_start, other_end = _from_seed(backbone, [replace(job, seed=6)])
    assert not torch.equal(start, other_start) and not torch.equal(end, other_end)


def _from_seed(backbone: Backbone, trials: list[Trial]) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of task `job` before and after, from the start values that its seed gives."""
    torch.manual_seed(len(trials))  # which nothing may depend on
    engine = Engine(backbone)
    examples = random_sequences([4, 19, 8, 11, 6], seed=99)  # the same for every seed
    for trial in trials:
        engine.attach(trial.job, Sequences(examples if trial.name == "job" else trial.examples))
    job = engine.task("job")
    start = job.adapter.parameters.values.clone()
    run(engine)
    return start, job.adapter.parameters.values.clone()
