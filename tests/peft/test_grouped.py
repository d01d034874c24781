"""Grouped is one by one, bit for bit, and who is grouped with whom."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muxtune.peft import grouped
from muxtune.peft.base import Dispatch
from muxtune.peft.dropout import row_keys
from muxtune.peft.grouped import PairShape, Rule, always, measured, never, rows_that_pay, runs
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.multiplex import hooks
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.slab import MOST, Slab, Slabs
from tests.peft.frozen import CPU, FrozenLinear

I, O = 32, 48  # noqa: E741 - the legend's letters


@dataclass(frozen=True, slots=True)
class Member:
    """A task: rows, rank, scale, dropout, rows of nobody before its own, and whether it lies in a slab."""

    rows: int
    r: int = 4
    scale: float = 0.75
    dropout: float = 0.0
    gap: int = 0
    slab: bool = True


def _op(dtype: torch.dtype = torch.float32) -> FrozenLinear:
    return FrozenLinear("op", I, O, dtype=dtype)


def _dispatches(members: Sequence[Member], dtype: torch.dtype = torch.float32) -> list[Dispatch]:
    slabs, found, at = Slabs(), [], 0
    for seed, member in enumerate(members):
        adapter = LoraAdapter(
            [_op(dtype)], r=member.r, scale=member.scale, dropout=member.dropout, seed=seed, dtype=dtype, device=CPU
        )
        with torch.no_grad():
            adapter.parameters.views["op.lora_B"].normal_(generator=torch.Generator().manual_seed(seed))
        if member.slab:
            slabs.take(adapter)
        at += member.gap
        place = np.arange(member.rows)
        keys = row_keys(seed, 0, place * 0, place, CPU) if member.dropout else None
        found.append(Dispatch(at, at + member.rows, adapter, keys))
        at += member.rows
    return found


def _sizes(members: Sequence[Member], rule: Rule = always) -> list[int]:
    """How many tasks each run has."""
    dispatches = _dispatches(members)
    stops = [dispatch.stop for dispatch in dispatches]
    ends = [stops.index(run.stop) + 1 for run in runs("op", dispatches, rule)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _trained(
    dispatches: Sequence[Dispatch], rule: Rule, dtype: torch.dtype = torch.float32, rows: range | None = None
) -> list[Tensor]:
    """Outputs, input gradients and each adapter's gradient after two passes; `rows` of a larger batch alone."""
    total = max(dispatch.stop for dispatch in dispatches) + 3
    generator = torch.Generator().manual_seed(1)
    x_TI, grad_TO = (torch.randn(200, width, generator=generator).to(dtype) for width in (I, O))
    assert total <= 200
    for dispatch in dispatches:
        dispatch.adapter.parameters.zero_gradient()
    for _ in range(2):
        leaf = x_TI[:total].clone().requires_grad_()
        y_TO = hooks(dispatches, grouping=rule)["op"](_op(dtype), leaf)
        y_TO.backward(grad_TO[:total])
    assert leaf.grad is not None
    return [y_TO.detach(), leaf.grad, *(dispatch.adapter.parameters.gradient.clone() for dispatch in dispatches)]


_MEMBERS = st.lists(
    st.builds(
        Member,
        rows=st.sampled_from([1, 1, 2, 5, 5, 16]),
        r=st.sampled_from([1, 2, 3, 4, 4, 8]),
        scale=st.sampled_from([0.75, 0.75, 2.0]),
        dropout=st.sampled_from([0.0, 0.0, 0.0, 0.3]),
        gap=st.sampled_from([0, 0, 0, 2]),
        slab=st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(members=_MEMBERS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_grouped_is_one_by_one_bit_for_bit(members: list[Member], dtype: torch.dtype) -> None:
    dispatches = _dispatches(members, dtype)
    grouped, one_by_one = (_trained(dispatches, rule, dtype) for rule in (always, never))
    assert all(torch.equal(one, other) for one, other in zip(grouped, one_by_one, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 16, 19])
@pytest.mark.parametrize("r", [2, 5, 8])
def test_a_groups_member_is_that_task_alone_bit_for_bit(r: int, rows: int) -> None:
    dispatches = _dispatches([Member(rows, r)] * 5)
    together = _trained(dispatches, always)
    assert [run.stop - run.start for run in runs("op", dispatches, always)] == [5 * rows]
    for number, dispatch in enumerate(dispatches):
        y_TO, grad_x_TI, gradient = _trained([dispatch], always)
        own = slice(dispatch.start, dispatch.stop)
        assert torch.equal(y_TO[own], together[0][own]) and torch.equal(grad_x_TI[own], together[1][own])
        assert torch.equal(gradient, together[2 + number]) and gradient.any()


def test_on_bf16_rows_a_group_computes_in_fp32_as_each_alone_does() -> None:
    dispatches = _dispatches([Member(7)] * 3)
    grouped, one_by_one = (_trained_bf16(dispatches, rule) for rule in (always, never))
    assert all(torch.equal(one, other) for one, other in zip(grouped, one_by_one, strict=True))


def _trained_bf16(dispatches: Sequence[Dispatch], rule: Rule) -> list[Tensor]:
    leaf = torch.randn(32, I, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    for dispatch in dispatches:
        dispatch.adapter.parameters.zero_gradient()
    y_TO = hooks(dispatches, grouping=rule)["op"](_op(torch.bfloat16), leaf)
    y_TO.sum().backward()
    assert leaf.grad is not None and y_TO.dtype == torch.bfloat16
    return [y_TO.detach(), leaf.grad, *(dispatch.adapter.parameters.gradient.clone() for dispatch in dispatches)]


@pytest.mark.parametrize(
    ("members", "sizes"),
    [
        ([Member(4)] * 3, [3]),
        ([Member(4), Member(4), Member(5), Member(5)], [2, 2]),
        ([Member(4), Member(4, r=8), Member(4)], [1, 1, 1]),
        ([Member(4), Member(4, scale=1.0), Member(4, scale=1.0)], [1, 2]),
        ([Member(4, r=1)] * 3, [1, 1, 1]),
        ([Member(4), Member(4, gap=1), Member(4)], [1, 2]),
        ([Member(4), Member(4, dropout=0.1), Member(4)], [1, 1, 1]),
        ([Member(4), Member(4, slab=False), Member(4)], [1, 1, 1]),
    ],
    ids=["alike", "ragged", "ranks", "scales", "rank-1", "gap", "dropout", "elsewhere"],
)
def test_who_is_grouped(members: list[Member], sizes: list[int]) -> None:
    assert _sizes(members) == sizes
    assert _sizes(members, never) == [1] * len(members)


def test_places_at_unequal_distances_are_not_one_group() -> None:
    one, two, three, four = _dispatches([Member(4)] * 4)
    moved = [one, Dispatch(4, 8, two.adapter, None), Dispatch(8, 12, four.adapter, None)]
    assert [run.stop for run in runs("op", moved, always)] == [8, 12]
    backwards = [Dispatch(0, 4, two.adapter, None), Dispatch(4, 8, one.adapter, None)]
    assert [run.stop for run in runs("op", backwards, always)] == [4, 8]
    every_other = [Dispatch(0, 4, one.adapter, None), Dispatch(4, 8, three.adapter, None)]
    assert [run.stop for run in runs("op", every_other, always)] == [8]
    for dispatches in (moved, backwards, every_other):
        grouped, one_by_one = (_trained(dispatches, rule) for rule in (always, never))
        assert all(torch.equal(a, b) for a, b in zip(grouped, one_by_one, strict=True))


def test_a_members_nan_stays_its_own() -> None:
    clean, dirty = _dispatches([Member(4)] * 3), _dispatches([Member(4)] * 3)
    with torch.no_grad():
        dirty[1].adapter.parameters.values.fill_(float("nan"))
    found, expected = _trained(dirty, always), _trained(clean, always)
    others = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    assert found[0][4:8].isnan().all() and found[3].isnan().any()
    assert torch.equal(found[0][others], expected[0][others]) and torch.equal(found[1][others], expected[1][others])
    assert torch.equal(found[2], expected[2]) and torch.equal(found[4], expected[4])


def test_moving_in_changes_nothing_and_places_come_free_again() -> None:
    slabs, twin = Slabs(), _dispatches([Member(4, slab=False)])[0].adapter
    (dispatch,) = _dispatches([Member(4, slab=False)])
    adapter, start = dispatch.adapter, dispatch.adapter.state()
    leaf = adapter.parameters.views["op.lora_A"]
    slabs.take(adapter)
    assert adapter.slot is not None and adapter.slot.index == 0
    assert adapter.parameters.views["op.lora_A"] is leaf
    assert all(torch.equal(value, start[name]) for name, value in adapter.state().items())
    adapter.parameters.values.mul_(2)
    assert torch.equal(leaf.detach(), 2 * start["op.lora_A"])
    assert leaf.grad is not None and leaf.grad.data_ptr() == adapter.parameters.gradient.data_ptr()
    slabs.take(twin)
    assert twin.slot is not None and (twin.slot.slab, twin.slot.index) == (adapter.slot.slab, 1)
    values = twin.parameters.values.clone()
    adapter.parameters.gradient.fill_(3)
    del dispatch, adapter, leaf
    gc.collect()
    (again,) = _dispatches([Member(4, slab=False)])
    slabs.take(again.adapter)
    assert again.adapter.slot is not None and again.adapter.slot.index == 0
    assert not again.adapter.parameters.gradient.any(), "what was there before has been left"
    assert torch.equal(twin.parameters.values, values)


def test_a_full_slab_is_followed_by_another() -> None:
    dispatches = _dispatches([Member(1)] * (MOST + 2))
    assert [len(list(group)) for group in (runs("op", dispatches, always),)] == [2]
    starts = list(accumulate(_sizes([Member(1)] * (MOST + 2))))
    assert starts == [MOST, MOST + 2]


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="a system that takes no pages back")
def test_free_places_give_their_memory_back() -> None:
    """And the one in between keeps what it holds."""

    def like() -> FlatParameters:
        return FlatParameters({"w": (5_000_001,)}, torch.float32, torch.device("cpu"))

    resident = psutil.Process().memory_info
    held = [like() for _ in range(3)]
    slab = Slab(held[0])
    for parameters in held:
        parameters.values.fill_(1)
        slab.take(parameters)
        parameters.gradient.fill_(2)
    kept = held[1]
    del held, parameters
    gc.collect()
    full = resident().rss
    slab.trim()
    assert full - resident().rss > 4 * 4 * 4_900_000
    assert bool((kept.values[:5_000_001] == 1).all()) and bool((kept.gradient == 2).all())
    again = like()
    assert slab.take(again) == 0 and not again.values.any()


def test_what_is_measured_is_a_number_of_rows() -> None:
    shape = PairShape(4, I, O, torch.float32)
    rows = rows_that_pay(shape, torch.get_num_threads())
    assert rows in (0, 4, 16, 64)
    assert measured(shape, rows) == (rows > 0) and not measured(shape, rows + 1)


def test_single_rows_are_not_grouped_where_it_pays_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a matrix and a vector have bits of their own."""
    monkeypatch.setattr(grouped, "rows_that_pay", lambda shape, threads: 64)
    shape = PairShape(4, I, O, torch.float32)
    assert [rows for rows in (1, 2, 64, 65) if measured(shape, rows)] == [2, 64]


def test_what_would_differ_is_never_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a batched product's item depends on the batch."""
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, b) * (1 + 1e-6 * (len(a) > 1)))
    assert rows_that_pay(PairShape(4, I, O + 16, torch.float32), torch.get_num_threads()) == 0
