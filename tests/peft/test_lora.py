"""LoRA's hand-written products against autograd through its formula, and its start values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from muxtune.peft.dropout import RowKeys, keep_mask, row_keys
from muxtune.peft.lora import LoraAdapter
from tests.peft.frozen import CPU, FrozenLinear, backward

T, I, O = 11, 32, 48  # noqa: E741 - the legend's letters


def _adapter(
    r: int = 4,
    *,
    dropout: float = 0.0,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
    names: tuple[str, ...] = ("op",),
) -> LoraAdapter:
    ops = [FrozenLinear(name, I, O, dtype=dtype) for name in names]
    return LoraAdapter(ops, r=r, scale=0.75, dropout=dropout, seed=seed, dtype=dtype, device=CPU)


def _fill_b(adapter: LoraAdapter) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, view in adapter.parameters.views.items():
            if name.endswith("lora_B"):
                view.copy_(torch.randn(view.shape, generator=generator))


def _keys() -> RowKeys:
    return row_keys(3, 2, np.repeat([0, 1], [5, 6]), np.concatenate([np.arange(5), np.arange(6)]), CPU)


def _rows(seed: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("with_input_gradient", [True, False])
def test_forward_and_backward_are_those_of_the_formula(r: int, dropout: float, with_input_gradient: bool) -> None:
    adapter = _adapter(r, dropout=dropout)
    _fill_b(adapter)
    module, keys = adapter.modules["op"], _keys() if dropout else None
    x, y, grad_y = _rows(1, I), _rows(2, O), _rows(3, O)
    a, b = (matrix.clone().requires_grad_() for matrix in adapter.pairs()["op"])
    x_leaf = x.clone().requires_grad_()
    kept = keep_mask(keys, "op", I, dropout).double() / (1 - dropout) if keys is not None else 1
    expected = y + 0.75 * (x_leaf * kept) @ a.T @ b.T
    grad_x, grad_a, grad_b = torch.autograd.grad(expected, (x_leaf, a, b), grad_y)

    twin = module.forward_plain(x, y.clone(), keys)
    output = y.clone()
    saved = module.forward_rows(x, output, keys)
    assert torch.allclose(output, expected, rtol=1e-12) and torch.allclose(twin, expected, rtol=1e-12)
    own_grad_x = _rows(4, I) if with_input_gradient else None
    for times in (1, 2):  # it adds to what is there
        backward(module, x, saved, grad_y, own_grad_x, keys)
        views = adapter.parameters.views
        assert torch.allclose(views["op.lora_A"].grad, times * grad_a, rtol=1e-11, atol=1e-13)
        assert torch.allclose(views["op.lora_B"].grad, times * grad_b, rtol=1e-11, atol=1e-13)
        if own_grad_x is not None:
            assert torch.allclose(own_grad_x, _rows(4, I) + times * grad_x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_on_bf16_rows_it_computes_in_its_own_fp32(dropout: float) -> None:
    adapter = _adapter(dropout=dropout, dtype=torch.float32)
    _fill_b(adapter)
    module, keys = adapter.modules["op"], _keys() if dropout else None
    x, y, grad_y = (_rows(seed, width, torch.bfloat16) for seed, width in ((1, I), (2, O), (3, O)))
    wide = y.float()
    saved_wide = module.forward_rows(x.float(), wide, keys)
    output = y.clone()
    saved = module.forward_rows(x, output, keys)
    assert output.dtype == torch.bfloat16 and torch.equal(output, wide.bfloat16()), "rounded once, at the end"
    assert saved[0].dtype == torch.float32 and torch.equal(saved[0], saved_wide[0])
    assert torch.allclose(module.forward_plain(x, y, keys).float(), output.float(), rtol=1e-2, atol=1e-2)
    grad_x = torch.zeros(T, I, dtype=torch.bfloat16)
    backward(module, x, saved, grad_y, grad_x, keys)
    narrow = adapter.parameters.gradient.clone()
    adapter.parameters.zero_gradient()
    wide_grad_x = torch.zeros(T, I)
    backward(module, x.float(), saved_wide, grad_y.float(), wide_grad_x, keys)
    assert torch.allclose(narrow, adapter.parameters.gradient, rtol=1e-5, atol=1e-6)
    assert torch.allclose(grad_x.float(), wide_grad_x, rtol=1e-2, atol=1e-2)


def test_it_starts_as_the_backbone_itself() -> None:
    adapter = _adapter(8)
    x, y = _rows(1, I), _rows(2, O)
    output = y.clone()
    adapter.modules["op"].forward_rows(x, output, None)
    a_RI, b_OR = adapter.pairs()["op"]
    assert torch.equal(output, y) and not b_OR.any() and bool(a_RI.all())


def test_start_values_follow_seed_and_name_alone() -> None:
    """reports.md 29: not what else is attached, not the order, not torch's own generator."""
    torch.manual_seed(1)
    alone = _adapter(seed=7, names=("b",)).pairs()["b"][0]
    torch.manual_seed(2)
    among = _adapter(seed=7, names=("a", "b", "c")).pairs()
    assert torch.equal(alone, among["b"][0])
    assert not torch.equal(among["a"][0], among["b"][0])
    assert not torch.equal(alone, _adapter(seed=8, names=("b",)).pairs()["b"][0])
    state = torch.get_rng_state()
    _adapter()
    assert torch.equal(torch.get_rng_state(), state)


def test_start_values_are_those_of_peft_in_distribution() -> None:
    """peft draws A by Kaiming-uniform with a = sqrt(5), which is uniform in +-1/sqrt(I)."""
    a_RI = _adapter(1000).pairs()["op"][0].flatten()
    bound = 1 / math.sqrt(I)
    peft = torch.empty(1000, I)
    torch.nn.init.kaiming_uniform_(peft, a=math.sqrt(5), generator=torch.Generator().manual_seed(1))
    assert float(a_RI.abs().max()) <= bound and float(peft.abs().max()) <= bound
    assert (
        float(a_RI.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02) == pytest.approx(float(peft.std()), rel=0.02)
    )
    assert abs(float(a_RI.mean())) < 0.01 * bound * 3


def test_pairs_are_the_live_values_and_go_in_again() -> None:
    adapter, other = _adapter(3, names=("a", "b")), _adapter(3, seed=2, names=("a", "b"))
    _fill_b(adapter)
    other.load_pairs({name: (a.clone(), b.clone()) for name, (a, b) in adapter.pairs().items()})
    assert torch.equal(adapter.parameters.values, other.parameters.values)
    a_RI, b_OR = adapter.pairs()["a"]
    assert a_RI.shape == (3, I) and b_OR.shape == (O, 3) and not a_RI.requires_grad
    adapter.parameters.values.zero_()
    assert not a_RI.any() and not b_OR.any()
    with pytest.raises(AssertionError):
        adapter.load_pairs({"a": other.pairs()["a"]})


@pytest.mark.parametrize(("dropout", "stochastic"), [(0.0, False), (0.1, True)])
def test_it_says_whether_it_needs_keys(dropout: float, stochastic: bool) -> None:
    assert _adapter(dropout=dropout).stochastic is stochastic


def test_without_keys_nothing_is_dropped() -> None:
    adapter, without = _adapter(dropout=0.9), _adapter()
    for one in (adapter, without):
        _fill_b(one)
    outputs = []
    for one in (adapter, without):
        outputs.append(_rows(2, O))
        one.modules["op"].forward_rows(_rows(1, I), outputs[-1], None)
    assert torch.equal(*outputs)
