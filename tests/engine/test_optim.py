"""One flat AdamW a task against torch's own over separate tensors, clipping and resumed moments included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from muxtune.engine.optim import FlatAdamW
from muxtune.peft.parameters import FlatParameters

SHAPES = {"a": (3, 5), "b": (7, 2)}
STEPS = 6


def _parameters() -> FlatParameters:
    parameters = FlatParameters(SHAPES, torch.float64, torch.device("cpu"), columns_first={"b"})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for view in parameters.views.values():
            view.copy_(torch.randn(view.shape, generator=generator))
    return parameters


def _gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def _step(parameters: FlatParameters, optimizer: FlatAdamW, step: int) -> float:
    for name, gradient in _gradients(step).items():
        parameters.views[name].grad.copy_(gradient)
    norm = optimizer.gradient_norm()
    optimizer.step(1e-2 * (step + 1), norm)
    return norm


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 1e6])
def test_steps_are_those_of_torchs_adamw_and_clip_grad_norm(weight_decay: float, max_grad_norm: float) -> None:
    parameters = _parameters()
    optimizer = FlatAdamW(parameters, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    theirs = {name: view.detach().clone().requires_grad_() for name, view in parameters.views.items()}
    adamw = torch.optim.AdamW(theirs.values(), lr=1.0, weight_decay=weight_decay)
    for step in range(STEPS):
        norm = _step(parameters, optimizer, step)
        for name, gradient in _gradients(step).items():
            theirs[name].grad = gradient
        limit = max_grad_norm or float("inf")
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.values(), limit)), rel=1e-12)
        adamw.param_groups[0]["lr"] = 1e-2 * (step + 1)
        adamw.step()
        for name, view in parameters.views.items():
            assert torch.allclose(view, theirs[name], rtol=1e-12, atol=1e-14)
    gaps = parameters.values.numel() - parameters.count
    assert gaps and int((parameters.values == 0).sum()) == gaps, "the gaps between views moved"


@pytest.mark.parametrize("at", range(STEPS))
def test_moments_put_into_a_new_optimizer_go_on_bit_for_bit(at: int) -> None:
    whole = _parameters()
    optimizer = FlatAdamW(whole, weight_decay=0.1, max_grad_norm=1.0)
    resumed = _parameters()
    second = FlatAdamW(resumed, weight_decay=0.1, max_grad_norm=1.0)
    for step in range(STEPS):
        if step == at:
            resumed.values.copy_(whole.values)
            second.load_moments(optimizer.moments(), step)
        _step(whole, optimizer, step)
        if step >= at:
            _step(resumed, second, step)
    assert torch.equal(whole.values, resumed.values)
    assert all(torch.equal(moment, second.moments()[name]) for name, moment in optimizer.moments().items())


def test_moments_are_copies_and_none_before_the_first_step() -> None:
    parameters = _parameters()
    optimizer = FlatAdamW(parameters, weight_decay=0.0, max_grad_norm=0.0)
    assert optimizer.moments() == {}
    _step(parameters, optimizer, 0)
    kept = optimizer.moments()["exp_avg"]
    before = kept.clone()
    _step(parameters, optimizer, 1)
    assert torch.equal(kept, before) and not torch.equal(kept, optimizer.moments()["exp_avg"])


def test_a_step_is_one_kernel_whatever_the_adapter_is_made_of() -> None:
    """Fused AdamW once, on the flat buffer; beside it a norm and a scaling, and nothing a parameter."""
    parameters = _parameters()
    optimizer = FlatAdamW(parameters, weight_decay=0.1, max_grad_norm=1e-3)
    _step(parameters, optimizer, 0)
    with _Operators() as ran:
        optimizer.step(1e-2, optimizer.gradient_norm())
    names = [name for name, size in ran.large if size == parameters.values.numel()]
    assert names.count("_fused_adamw_") == 1 and len(names) <= 3
    assert not [name for name, size in ran.large if size != parameters.values.numel()]


class _Operators(TorchDispatchMode):
    """Names of what runs on more than one number, and on how many."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0][0] if isinstance(args[0], list) else args[0]
        if isinstance(first, torch.Tensor) and first.numel() > 1:
            self.large.append((func.overloadpacket.__name__, first.numel()))
        return func(*args, **(kwargs or {}))
