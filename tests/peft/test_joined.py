"""Adapters at linears that run as one product: as at the same linears one by one, and each task by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from muxtune.peft.base import Adapter, Dispatch
from muxtune.peft.dora import DoraAdapter
from muxtune.peft.dropout import row_keys
from muxtune.peft.ia3 import IA3Adapter
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.multiplex import hooks
from tests.peft.frozen import CPU, FrozenLinear

T, WIDTH, SIZES = 40, 48, (64, 32, 32)


class FrozenGroup(FrozenLinear):
    """Its members' weights are views of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("joined", WIDTH, sum(SIZES), dtype=dtype)
        self.members = []
        weights, biases = self.weight_OI.split(SIZES), self.bias.split(SIZES)
        for index, (size, weight_OI, bias) in enumerate(zip(SIZES, weights, biases, strict=True)):
            member = FrozenLinear(f"op{index}", WIDTH, size, dtype=dtype)
            member.weight_OI, member.bias = weight_OI, bias
            self.members.append(member)


Build = Callable[[FrozenGroup, torch.dtype], Adapter]


def _lora(points: Sequence[int], seed: int, dropout: float = 0.0) -> Build:
    def build(group: FrozenGroup, dtype: torch.dtype) -> Adapter:
        ops = [group.members[index] for index in points]
        return LoraAdapter(ops, r=4, scale=0.5, dropout=dropout, seed=seed, dtype=dtype, device=CPU)

    return build


def _dora(group: FrozenGroup, dtype: torch.dtype) -> Adapter:
    return DoraAdapter(group.members[1:], r=3, scale=0.5, dropout=0.0, seed=3, dtype=dtype, device=CPU)


def _ia3(group: FrozenGroup, dtype: torch.dtype) -> Adapter:
    """On the input of the first, on the output of the second."""
    return IA3Adapter(group.members[1:2], group.members[:1], dtype=dtype, device=CPU)


# Whose rows are where; between them and after them are nobody's.
TASKS: dict[str, tuple[int, int, Build]] = {
    "lora": (0, 5, _lora((0, 1, 2), 1)),
    "drop": (5, 12, _lora((0, 2), 2, dropout=0.4)),
    "ia3": (14, 19, _ia3),
    "dora": (19, 30, _dora),
    "one": (30, 33, _lora((1,), 4)),
}


def _dispatches(group: FrozenGroup, names: Sequence[str], dtype: torch.dtype) -> list[Dispatch]:
    found = []
    for name in names:
        start, stop, build = TASKS[name]
        adapter = build(group, dtype)
        values = adapter.parameters.values
        with torch.no_grad():
            values += 0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(len(name)), dtype=dtype)
        adapter.refresh()
        position = np.arange(stop - start)
        keys = row_keys(7, 0, position * 0, position, CPU) if name == "drop" else None
        found.append(Dispatch(start, stop, adapter, keys))
    return found


def _rows(width: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _run(
    names: Sequence[str], dtype: torch.dtype, *, joined: bool = True, plain: bool = False, spoiled: slice | None = None
) -> SimpleNamespace:
    """A pass over the linears; `joined` or one by one, each with its hook where it has one."""
    group = FrozenGroup(dtype)
    dispatches = _dispatches(group, names, dtype)
    found = hooks(dispatches, plain=plain, joined=[group] if joined else ())
    x_TI, grad_TX = _rows(WIDTH, 1, dtype), _rows(sum(SIZES), 2, dtype)
    if spoiled is not None:
        x_TI[spoiled] = float("nan")
    x_TI.requires_grad_()
    if joined:
        assert set(found) == ({"joined"} if names else set())
        y_TX = found["joined"](group, x_TI) if names else group.forward(x_TI)
    else:
        y_TX = torch.cat([found.get(m.name, lambda m, x: m.forward(x))(m, x_TI) for m in group.members], dim=1)
    kept = grad_TX.clone()
    y_TX.backward(grad_TX)
    assert torch.equal(grad_TX, kept), "a gradient that others may read was written over"
    gradients = {name: one.adapter.parameters.gradient.clone() for name, one in zip(names, dispatches, strict=True)}
    return SimpleNamespace(y=y_TX.detach(), x=x_TI.grad, gradients=gradients, group=group)


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("names", [tuple(TASKS), *((name,) for name in TASKS)], ids="+".join)
def test_joined_is_one_by_one(names: tuple[str, ...], plain: bool) -> None:
    joined = _run(names, torch.float64, plain=plain)
    apart = _run(names, torch.float64, joined=False, plain=True)
    torch.testing.assert_close(joined.y, apart.y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(joined.x, apart.x, rtol=1e-12, atol=1e-12)
    for name in names:
        assert bool(apart.gradients[name].any())
        torch.testing.assert_close(joined.gradients[name], apart.gradients[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_neighbour_changes_a_bit(dtype: torch.dtype) -> None:
    together, bare = _run(tuple(TASKS), dtype), _run((), dtype)
    for name, (start, stop, _) in TASKS.items():
        alone = _run((name,), dtype)
        own = slice(start, stop)
        assert torch.equal(together.y[own], alone.y[own]) and torch.equal(together.x[own], alone.x[own])
        assert torch.equal(together.gradients[name], alone.gradients[name])
    for nobodys in (slice(12, 14), slice(33, T)):
        assert torch.equal(together.y[nobodys], bare.y[nobodys]) and torch.equal(together.x[nobodys], bare.x[nobodys])


@pytest.mark.parametrize("name", TASKS)
def test_what_is_not_finite_stays_with_its_task(name: str) -> None:
    start, stop, _ = TASKS[name]
    spoiled = _run(tuple(TASKS), torch.float32, spoiled=slice(start, stop))
    for other, gradient in spoiled.gradients.items():
        assert bool(gradient.isfinite().all()) == (other != name)


def test_the_product_runs_once_each_way_and_members_only_for_rows_that_are_not_its_own() -> None:
    group = _run(tuple(TASKS), torch.float32).group
    assert group.forward_rows == [T] and group.backward_rows == [T]
    scaled = TASKS["ia3"][1] - TASKS["ia3"][0]
    assert [member.forward_rows for member in group.members] == [[scaled], [], []]
    assert [member.backward_rows for member in group.members] == [[scaled], [], []]


@pytest.mark.parametrize("name", TASKS)
def test_without_a_gradient_below_parameters_have_theirs(name: str) -> None:
    group = FrozenGroup(torch.float64)
    (dispatch,) = _dispatches(group, (name,), torch.float64)
    y_TX = hooks([dispatch], joined=[group])["joined"](group, _rows(WIDTH, 1, torch.float64))
    y_TX.backward(_rows(sum(SIZES), 2, torch.float64))
    expected = _run((name,), torch.float64).gradients[name]
    torch.testing.assert_close(dispatch.adapter.parameters.gradient, expected, rtol=1e-12, atol=1e-12)
    assert not group.backward_rows
