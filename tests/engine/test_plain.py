"""Every fast path has a plain twin through autograd, chosen by one flag: both train the same."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from muxtune.engine.engine import Engine
from tests.engine.build import Trained, attach, backbone_of, exact, gradients_of, mixed_trials, train
from tests.reference import LoraPair, relative_difference
from tests.tiny import SUPPORTED


@cache
def _trained(arch: str, dtype: torch.dtype, plain: bool) -> dict[str, Trained]:
    return train(backbone_of(arch, dtype), mixed_trials(arch), plain=plain)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_twin_trains_the_same_in_fp64(arch: str) -> None:
    fast, plain = _trained(arch, torch.float64, False), _trained(arch, torch.float64, True)
    for name in fast:
        assert fast[name].losses == pytest.approx(plain[name].losses, rel=1e-12)
        assert fast[name].grad_norms == pytest.approx(plain[name].grad_norms, rel=1e-10)
        assert relative_difference(fast[name].pairs, plain[name].pairs) < 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_the_twins_first_gradients_agree(arch: str, dtype: torch.dtype, tolerance: float) -> None:
    fast, plain = _gradients(arch, dtype, plain=False), _gradients(arch, dtype, plain=True)
    for name in fast:
        assert relative_difference(fast[name], plain[name]) < tolerance


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_the_twins_forward_passes_agree(arch: str) -> None:
    outcomes = []
    for plain in (False, True):
        engine = Engine(backbone_of(arch, torch.float64), plain=plain)
        tasks = [attach(engine, trial) for trial in mixed_trials(arch)]
        outcomes.append(engine.forward({task: task.data.train for task in tasks}))
    for name, fast in outcomes[0].items():
        plain_twin = outcomes[1][name]
        assert fast.logprobs == pytest.approx(plain_twin.logprobs, rel=1e-6)
        assert (fast.tokens, fast.correct, fast.input_tokens) == (
            plain_twin.tokens,
            plain_twin.correct,
            plain_twin.input_tokens,
        )


def _gradients(arch: str, dtype: torch.dtype, *, plain: bool) -> dict[str, dict[str, LoraPair]]:
    with exact(dtype):
        engine = Engine(backbone_of(arch, dtype), plain=plain)
        tasks = [attach(engine, trial) for trial in mixed_trials(arch)]
        engine.forward_backward({task: task.data.train for task in tasks})
    return {task.name: gradients_of(task) for task in tasks}


def test_a_bf16_backbone_trains_fp32_adapters_and_the_twin_agrees() -> None:
    """Activations are rounded to eight bits of mantissa, so the two may differ by that and no more."""
    fast, plain = _trained("llama", torch.bfloat16, False), _trained("llama", torch.bfloat16, True)
    exact_losses = _trained("llama", torch.float32, False)
    for name in fast:
        assert fast[name].values.dtype == torch.float32
        assert fast[name].losses == pytest.approx(plain[name].losses, rel=2e-2)
        assert fast[name].losses == pytest.approx(exact_losses[name].losses, rel=5e-2)
