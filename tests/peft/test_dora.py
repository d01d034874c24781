"""DoRA's norms and formula at one linear, without a backbone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from muxtune.peft.base import Dispatch
from muxtune.peft.dora import DoraAdapter, merged
from muxtune.peft.dropout import RowKeys, keep_mask, row_keys
from muxtune.peft.multiplex import hooks
from tests.peft.frozen import CPU, FrozenLinear

T, I, O = 11, 32, 48  # noqa: E741 - the legend's letters
SCALE = 0.75


def _op(*, bias: bool = True, dtype: torch.dtype = torch.float64) -> FrozenLinear:
    op = FrozenLinear("op", I, O, dtype=dtype)
    op.bias = op.bias if bias else None
    return op


def _adapter(op: FrozenLinear, *, dropout: float = 0.0, moved: bool = True) -> DoraAdapter:
    dtype = torch.promote_types(op.weight_OI.dtype, torch.float32)
    adapter = DoraAdapter([op], r=4, scale=SCALE, dropout=dropout, seed=1, dtype=dtype, device=CPU)
    if moved:
        generator = torch.Generator().manual_seed(5)
        state = adapter.state()
        adapter.load(
            {name: value + 0.3 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
        )
    return adapter


def _keys() -> RowKeys:
    return row_keys(3, 2, np.zeros(T, np.int64), np.arange(T), CPU)


def _rows(seed: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_norms_are_those_of_the_adapted_rows_and_follow_the_parameters(dtype: torch.dtype) -> None:
    op = _op(dtype=dtype)
    adapter = _adapter(op)
    module = adapter.modules["op"]
    a_RI, b_OR = adapter.pairs()["op"]
    exact = torch.linalg.vector_norm(op.weight_OI.double() + SCALE * b_OR.double() @ a_RI.double(), dim=1)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    torch.testing.assert_close(module.norm_O.double(), exact, rtol=tolerance, atol=0)
    adapter.parameters.views["op.lora_B"].detach().zero_()
    stale = module.norm_O.clone()
    adapter.refresh()
    assert not torch.equal(module.norm_O, stale)
    assert torch.equal(module.norm_O, op.weight_OI.square().sum(1).sqrt())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("plain", [True, False])
def test_output_and_gradients_are_those_of_the_formula(bias: bool, dropout: float, plain: bool) -> None:
    """The norm is a constant to the gradient; with dropout the whole adapted product sees the dropped-out rows."""
    op = _op(bias=bias)
    adapter = _adapter(op, dropout=dropout)
    keys = _keys() if dropout else None
    x, grad_y = _rows(1, I), _rows(3, O)

    leaf = x.clone().requires_grad_()
    a, b = (value.clone().requires_grad_() for value in adapter.pairs()["op"])
    m = adapter.magnitudes()["op"].clone().requires_grad_()
    kept = 1 if keys is None else keep_mask(keys, "op", I, dropout).double() / (1 - dropout)
    length = m / torch.linalg.vector_norm(op.weight_OI + SCALE * b @ a, dim=1).detach()
    seen = leaf * kept
    own = F.linear(leaf, op.weight_OI, op.bias)
    expected = own + (length - 1) * F.linear(seen, op.weight_OI) + length * SCALE * (seen @ a.T @ b.T)
    wanted = torch.autograd.grad(expected, (leaf, a, b, m), grad_y)

    ours = x.clone().requires_grad_()
    y = hooks([Dispatch(0, T, adapter, keys)], plain=plain)["op"](op, ours)
    y.backward(grad_y)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    views = adapter.parameters.views
    found = (ours.grad, *(views[f"op.{name}"].grad for name in ("lora_A", "lora_B", "lora_magnitude_vector")))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    if not dropout:  # then it is one linear of another weight
        whole = merged(op.weight_OI, *adapter.pairs()["op"], adapter.magnitudes()["op"], SCALE)
        torch.testing.assert_close(y, F.linear(x, whole, op.bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_zeros_is_no_nan(dtype: torch.dtype) -> None:
    """A pruned output feature: 0 / 0 in peft."""
    op = _op(dtype=dtype)
    op.weight_OI[3] = 0
    adapter = _adapter(op, moved=False)
    x = _rows(1, I, dtype)
    for _ in range(3):
        y = hooks([Dispatch(0, T, adapter, None)])["op"](op, x.clone().requires_grad_())
        assert y.isfinite().all() and y.dtype == dtype
        y.sum().backward()
        gradient = adapter.parameters.gradient
        assert gradient.isfinite().all() and gradient.any()
        adapter.parameters.values.sub_(gradient.clamp(-1, 1), alpha=0.1)
        adapter.parameters.zero_gradient()
        adapter.refresh()
    assert adapter.parameters.values.isfinite().all()
    state = adapter.state()
    whole = merged(
        op.weight_OI.float(), state["op.lora_A"], state["op.lora_B"], state["op.lora_magnitude_vector"], SCALE
    )
    assert whole.isfinite().all()
