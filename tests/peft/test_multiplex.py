"""Dispatch and Aggregate: one BaseOp, many adapters, each on its own rows and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from muxtune.peft.base import Dispatch
from muxtune.peft.dropout import row_keys
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.multiplex import hooks
from tests.peft.frozen import CPU, FrozenLinear

T, WIDTH = 64, 32


def _op(dtype: torch.dtype = torch.float64) -> FrozenLinear:
    return FrozenLinear("op", WIDTH, WIDTH + 16, dtype=dtype)


def _adapter(seed: int, r: int, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> LoraAdapter:
    adapter = LoraAdapter([_op(dtype)], r=r, scale=0.5, dropout=dropout, seed=seed, dtype=dtype, device=CPU)
    with torch.no_grad():
        adapter.parameters.views["op.lora_B"].normal_(generator=torch.Generator().manual_seed(seed))
    return adapter


def _dispatches(dtype: torch.dtype = torch.float64) -> list[Dispatch]:
    """Three adapters, out of order, with rows of nobody before, between and after; one drops out."""
    keys = row_keys(9, 0, np.zeros(20, np.int64), np.arange(20), CPU)
    return [
        Dispatch(40, 50, _adapter(1, 3, dtype=dtype), None),
        Dispatch(5, 25, _adapter(2, 8, 0.3, dtype), keys),
        Dispatch(25, 31, _adapter(3, 16, dtype=dtype), None),
    ]


def _rows(dtype: torch.dtype, seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(
    dispatches: list[Dispatch], x_TI: Tensor, *, plain: bool = False, op: FrozenLinear | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output, and gradient of the input; the adapters' gradients add up in their buffers."""
    op = op or _op(x_TI.dtype)
    leaf = x_TI.clone().requires_grad_()
    y_TO = hooks(dispatches, plain=plain)["op"](op, leaf)
    y_TO.backward(_rows(x_TI.dtype, 7, op.out_features))
    return y_TO.detach(), leaf.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_the_fused_node_agrees_with_its_twin(dtype: torch.dtype, tolerance: float) -> None:
    fast, plain = _dispatches(dtype), _dispatches(dtype)
    for own, twin in zip(_run(fast, _rows(dtype, 1)), _run(plain, _rows(dtype, 1), plain=True), strict=True):
        assert own is not None and twin is not None
        assert torch.allclose(own, twin, rtol=tolerance, atol=tolerance)
    for one, other in zip(fast, plain, strict=True):
        gradient = other.adapter.parameters.gradient
        assert gradient.any()
        assert torch.allclose(one.adapter.parameters.gradient, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_each_adapter_works_on_its_rows_and_rows_of_nobody_are_the_base_ops(plain: bool) -> None:
    dispatches, x_TI, op = _dispatches(), _rows(torch.float64, 1), _op()
    y_TO, grad_x_TI = _run(dispatches, x_TI, plain=plain)
    assert grad_x_TI is not None
    nobody = torch.ones(T, dtype=torch.bool)
    for dispatch in dispatches:
        rows = slice(dispatch.start, dispatch.stop)
        nobody[rows] = False
        expected = dispatch.adapter.modules["op"].forward_plain(x_TI[rows], op.forward(x_TI)[rows], dispatch.keys)
        assert torch.allclose(y_TO[rows], expected, rtol=1e-12)
    assert torch.equal(y_TO[nobody], op.forward(x_TI)[nobody])
    assert torch.equal(grad_x_TI[nobody], op.input_gradient(_rows(torch.float64, 7, op.out_features))[nobody])


def test_the_base_op_runs_once_each_way_on_all_rows() -> None:
    op = _op()
    _run(_dispatches(), _rows(torch.float64, 1), op=op)
    assert op.forward_rows == [T] and op.backward_rows == [T]


def test_where_nothing_below_trains_the_base_op_has_no_backward_and_adapters_have() -> None:
    op, dispatches = _op(), _dispatches()
    y_TO = hooks(dispatches)["op"](op, _rows(torch.float64, 1))
    y_TO.sum().backward()
    assert op.forward_rows == [T] and op.backward_rows == []
    assert all(dispatch.adapter.parameters.gradient.any() for dispatch in dispatches)


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("poison", ["parameters", "rows"])
def test_a_neighbours_nan_does_not_cross(poison: str, dtype: torch.dtype, plain: bool) -> None:
    """Slices, never masks: 0 * NaN would be NaN."""
    clean, dirty = _dispatches(dtype), _dispatches(dtype)
    x_TI = _rows(dtype, 1)
    y_clean, grad_clean = _run(clean, x_TI, plain=plain)
    spoilt = x_TI.clone()
    if poison == "rows":
        spoilt[25:31] = float("nan")
    else:
        with torch.no_grad():
            dirty[2].adapter.parameters.values.fill_(float("nan"))
    y_dirty, grad_dirty = _run(dirty, spoilt, plain=plain)
    assert grad_clean is not None and grad_dirty is not None and y_dirty[25:31].isnan().all()
    others = torch.tensor([row for row in range(T) if not 25 <= row < 31])
    assert torch.equal(y_dirty[others], y_clean[others]) and torch.equal(grad_dirty[others], grad_clean[others])
    for place in (0, 1):
        assert torch.equal(dirty[place].adapter.parameters.gradient, clean[place].adapter.parameters.gradient)


def test_only_hooked_attach_points_get_a_hook() -> None:
    other = FrozenLinear("other", WIDTH, WIDTH, dtype=torch.float64)
    both = LoraAdapter([_op(), other], r=2, scale=1, dropout=0, seed=1, dtype=torch.float64, device=CPU)
    found = hooks([Dispatch(0, 4, _adapter(1, 2), None), Dispatch(4, 9, both, None)])
    assert set(found) == {"op", "other"}
    y_TO = found["other"](other, _rows(torch.float64, 1))
    assert torch.equal(y_TO, other.forward(_rows(torch.float64, 1))), "B starts at zero"
    assert hooks([]) == {}


@pytest.mark.parametrize("second", [(3, 8), (0, 5), (4, 5), (5, 5)])
def test_rows_of_two_adapters_may_not_overlap_nor_be_none(second: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="overlap"):
        hooks([Dispatch(0, 5, _adapter(1, 2), None), Dispatch(*second, _adapter(2, 2), None)])
