"""bf16: a rounded backbone under fp32 adapters trains as transformers + peft does, and tasks stay apart bit for bit.

The yardsticks are runs in fp32: bf16 itself moves losses by some thousandths of their size, and ours may move them no
more than twice what transformers + peft's bf16 does (both round the same operators, in another order), all steps of all
tasks together: AdamW makes of roundings what it will in any one of them. Nor are the gradients of the fast block
further from those without rounding than the twin's are.
"""

from __future__ import annotations

import math
from statistics import mean

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.models.backbone import Backbone, BlockChoice
from tests.engine.build import Trained, Trial, assert_same_bits, attach, backbone_of, reference, train
from tests.engine.selective import relative

ARCHITECTURES = ("llama", "qwen2", "gemma2", "gpt2")
TRIALS = (
    Trial("mixed", [12, 30, 7, 21], steps=12, learning_rate=5e-3),
    Trial("dropped", [40, 9, 33], r=8, dropout=0.1, seed=2, steps=12, learning_rate=5e-3),
    Trial("short", [16] * 4, seed=3, steps=12, learning_rate=5e-3),
)


def _train(arch: str, trials: tuple[Trial, ...] = TRIALS, **options: object) -> dict[str, Trained]:
    return train(backbone_of(arch, torch.bfloat16), trials, **options)


def _gaps(one: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) / b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_in_bf16_is_as_close_to_fp32_as_peft_is(arch: str) -> None:
    ours = _train(arch)
    own: list[float] = []
    theirs: list[float] = []
    for trial in TRIALS:
        trained = ours[trial.name]
        assert trained.losses[-1] < 0.85 * trained.losses[0]
        assert all(map(math.isfinite, trained.grad_norms)) and bool(trained.values.isfinite().all())
        exact = reference(arch, trial, torch.float32).losses
        own += _gaps(trained.losses, exact)
        theirs += _gaps(reference(arch, trial, torch.bfloat16).losses, exact)
    assert 0 < mean(own) < 2 * mean(theirs)


def _gradients(backbone: Backbone, **options: object) -> dict[str, dict[str, Tensor]]:
    """Of one pass, all tasks in it, away from B = 0."""
    engine = Engine(backbone, **options)
    tasks = [attach(engine, trial) for trial in TRIALS]
    for task in tasks:
        values = task.adapter.parameters.values
        with torch.no_grad():
            values += 0.02 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    engine.forward_backward({task: task.data.train for task in tasks})
    views = {task.name: task.adapter.parameters.views for task in tasks}
    return {name: {key: view.grad.double() for key, view in own.items()} for name, own in views.items()}


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_fast_block_rounds_no_more_than_its_twin(arch: str) -> None:
    wide = backbone_of(arch, block="transformers")
    rounded = {block: backbone_of(arch, torch.bfloat16, block=block) for block in ("fast", "transformers")}
    for own, other in zip(wide.model.parameters(), rounded["fast"].model.parameters(), strict=True):
        own.copy_(other)
    exact = _gradients(wide)
    fast, twin = (
        {name: relative(one, exact[name]) for name, one in _gradients(rounded[block]).items()} for block in rounded
    )
    assert 0 < mean(fast.values()) < 1.15 * mean(twin.values())


@pytest.mark.parametrize("block", ["transformers", "auto"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_plain_twin_agrees_in_bf16(arch: str, block: BlockChoice) -> None:
    """Gradients are nearer to each other than to those without rounding. (Where linears are joined, the twins add up
    their input gradient in another order, and each sum is rounded; steps of AdamW would amplify that.)"""
    backbone = backbone_of(arch, torch.bfloat16, block=block)
    wide = backbone_of(arch, block=block)
    for own, rounded in zip(wide.model.parameters(), backbone.model.parameters(), strict=True):
        own.copy_(rounded)
    fast, plain, exact = _gradients(backbone), _gradients(backbone, plain=True), _gradients(wide)
    for name, gradient in fast.items():
        assert 0 < relative(plain[name], exact[name]) < 0.03
        assert relative(gradient, plain[name]) < 0.5 * relative(plain[name], exact[name])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_together_is_alone_bit_for_bit_in_bf16(arch: str) -> None:
    if not Engine(backbone_of(arch, torch.bfloat16)).row_invariant:
        pytest.skip("rows of a bf16 product depend on the batch on this machine")
    together = _train(arch)
    for trial in TRIALS:
        assert_same_bits(together[trial.name], _train(arch, (trial,))[trial.name])


def test_adapters_and_moments_stay_in_fp32() -> None:
    engine = Engine(backbone_of("llama", torch.bfloat16))
    task = engine.attach(TRIALS[0].job, Sequences(TRIALS[0].examples))
    engine.execute(engine.schedule([task.participant()]))
    held = [task.adapter.parameters.values, task.adapter.parameters.gradient, *task.optimizer.moments().values()]
    assert len(held) == 4
    assert {tensor.dtype for tensor in held} == {torch.float32}
    assert {parameter.dtype for parameter in engine.backbone.model.parameters()} == {torch.bfloat16}
