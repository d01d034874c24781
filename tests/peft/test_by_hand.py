"""Every type that comes by hand equals its plain twin, at one linear: outputs, gradients of rows and of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from muxtune.peft.base import Adapter, Dispatch
from muxtune.peft.bitfit import BiasModule
from muxtune.peft.dora import DoraAdapter
from muxtune.peft.dropout import RowKeys, row_keys
from muxtune.peft.ia3 import IA3Adapter
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.multiplex import hooks
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.pissa import PissaAdapter
from muxtune.peft.shira import ShiraModule
from tests.exact import exact_fp64
from tests.peft.frozen import CPU, FrozenLinear

T, I, O = 40, 32, 48  # noqa: E741 - the legend's letters
START, STOP = 7, 29
Builder = Callable[[FrozenLinear, torch.dtype, float], Adapter]


def _pair(kind: type[LoraAdapter] | type[DoraAdapter]) -> Builder:
    return lambda op, dtype, dropout: kind([op], r=3, scale=0.75, dropout=dropout, seed=1, dtype=dtype, device=CPU)


def _pissa(op: FrozenLinear, dtype: torch.dtype, dropout: float) -> Adapter:
    return PissaAdapter([op], r=3, scale=0.75, dropout=dropout, dtype=dtype, device=CPU)


def _bias(op: FrozenLinear, dtype: torch.dtype, dropout: float) -> Adapter:
    parameters = FlatParameters({"op.bias": (O,)}, dtype, CPU)
    return Adapter({"op": BiasModule(parameters.views["op.bias"])}, parameters)


def _shira(op: FrozenLinear, dtype: torch.dtype, dropout: float) -> Adapter:
    parameters = FlatParameters({"op.weight": (4,)}, dtype, CPU)
    places_2P = torch.tensor([[0, 3, 3, 40], [5, 1, 30, 0]])
    return Adapter({"op": ShiraModule(parameters.views["op.weight"], places_2P, (O, I))}, parameters)


BUILDERS: Mapping[str, Builder] = {
    "lora": _pair(LoraAdapter),
    "dora": _pair(DoraAdapter),
    "pissa": _pissa,
    "ia3-output": lambda op, dtype, dropout: IA3Adapter([op], [], dtype=dtype, device=CPU),
    "ia3-input": lambda op, dtype, dropout: IA3Adapter([], [op], dtype=dtype, device=CPU),
    "bitfit": _bias,
    "shira": _shira,
}
CASES = [(name, 0.0) for name in BUILDERS] + [(name, 0.4) for name in ("lora", "dora", "pissa")]


@dataclass(frozen=True, slots=True)
class Found:
    y_TO: Tensor
    grad_x_TI: Tensor
    gradient: Tensor


def _adapter(name: str, op: FrozenLinear, dropout: float) -> Adapter:
    """Moved from its start; one number of each vector is zero, where a division by it would show."""
    dtype = torch.promote_types(op.weight_OI.dtype, torch.float32)
    adapter = BUILDERS[name](op, dtype, dropout)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for view in adapter.parameters.views.values():
            view += 0.3 * torch.randn(view.shape, generator=generator).to(view)
            if view.ndim == 1:
                view[2] = 0
    adapter.refresh()
    return adapter


def _rows(seed: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _keys(dropout: float) -> RowKeys | None:
    count = STOP - START
    return row_keys(3, 2, np.zeros(count, np.int64), np.arange(count), CPU) if dropout else None


def _run(op: FrozenLinear, adapter: Adapter, dropout: float, *, plain: bool, x_TI: Tensor | None = None) -> Found:
    dtype = op.weight_OI.dtype
    leaf = (_rows(1, I, dtype) if x_TI is None else x_TI).clone().requires_grad_()
    grad_y_TO = _rows(3, O, dtype)
    before = grad_y_TO.clone()
    hook = hooks([Dispatch(START, STOP, adapter, _keys(dropout))], plain=plain)["op"]
    y_TO = hook(op, leaf)
    y_TO.backward(grad_y_TO)
    assert torch.equal(grad_y_TO, before), "the gradient that came in is somebody else's"
    assert leaf.grad is not None
    gradient = adapter.parameters.gradient.clone()
    adapter.parameters.zero_gradient()
    return Found(y_TO.detach(), leaf.grad, gradient)


def _op(dtype: torch.dtype, *, bias: bool = True) -> FrozenLinear:
    op = FrozenLinear("op", I, O, dtype=dtype)
    op.bias = op.bias if bias else None
    return op


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("name", "dropout"), CASES)
def test_by_hand_is_the_plain_twin(name: str, dropout: float, bias: bool) -> None:
    with exact_fp64():
        op = _op(torch.float64, bias=bias)
        adapter = _adapter(name, op, dropout)
        assert adapter.modules["op"].by_hand
        fast, plain = (_run(op, adapter, dropout, plain=twin) for twin in (False, True))
    for one, other in ((fast.y_TO, plain.y_TO), (fast.grad_x_TI, plain.grad_x_TI), (fast.gradient, plain.gradient)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert fast.gradient.any() and not torch.equal(
        fast.y_TO[START:STOP], op.forward(_rows(1, I, torch.float64)[START:STOP])
    )


@pytest.mark.parametrize(("name", "dropout"), CASES)
def test_on_a_bf16_backbone_parameters_and_their_gradients_are_fp32(name: str, dropout: float) -> None:
    """Rounded to bf16 only where rows are handed on, so parameters' gradients are those of the twin to fp32's bits."""
    op = _op(torch.bfloat16)
    adapter = _adapter(name, op, dropout)
    fast, plain = (_run(op, adapter, dropout, plain=twin) for twin in (False, True))
    assert fast.y_TO.dtype == fast.grad_x_TI.dtype == torch.bfloat16 and fast.gradient.dtype == torch.float32
    torch.testing.assert_close(fast.y_TO, plain.y_TO, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(fast.grad_x_TI, plain.grad_x_TI, rtol=2e-2, atol=0.15)
    loose = name == "ia3-input"  # it multiplies the BaseOp's input gradient, which is rounded
    torch.testing.assert_close(fast.gradient, plain.gradient, rtol=1e-4, atol=0.3 if loose else 1e-3)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_where_nothing_below_trains_parameters_still_do(name: str) -> None:
    op = _op(torch.float32)
    adapter = _adapter(name, op, 0.0)
    expected = _run(op, adapter, 0.0, plain=False).gradient
    op.backward_rows.clear()
    hooks([Dispatch(START, STOP, adapter, None)])["op"](op, _rows(1, I, torch.float32)).backward(
        _rows(3, O, torch.float32)
    )
    assert torch.equal(adapter.parameters.gradient, expected) and expected.any()
    assert op.backward_rows == ([T] if name == "ia3-input" else []), "its own gradient is all that asks for it"


def test_all_types_in_one_pass_are_each_alone_to_the_bit() -> None:
    op, rows = _op(torch.float32), 5
    x_TI, grad_y_TO = _rows(1, I, torch.float32), _rows(3, O, torch.float32)

    def run(names: Sequence[str]) -> dict[str, tuple[Tensor, ...]]:
        places = {name: list(BUILDERS).index(name) * rows for name in names}
        adapters = {name: _adapter(name, op, 0.0) for name in names}
        leaf = x_TI.clone().requires_grad_()
        dispatches = [Dispatch(places[name], places[name] + rows, adapters[name], None) for name in names]
        y_TO = hooks(dispatches)["op"](op, leaf)
        y_TO.backward(grad_y_TO)
        assert leaf.grad is not None
        return {
            name: (y_TO[at : at + rows].detach(), leaf.grad[at : at + rows], adapters[name].parameters.gradient)
            for name, at in places.items()
        }

    together = run(list(BUILDERS))
    for name in BUILDERS:
        assert all(torch.equal(one, other) for one, other in zip(together[name], run([name])[name], strict=True))
