"""Adapters on the head in the sliced sweep: by formula, in any company, on vocabularies of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muxtune.engine.head import hooked_rows
from muxtune.models.head_rows import ROW_MULTIPLE, SLICE_ROWS, HeadRows, cut
from muxtune.models.loss import Head, TokenLosses, token_losses, token_losses_plain
from muxtune.peft.base import Dispatch
from muxtune.peft.dropout import row_keys
from muxtune.peft.lora import LoraAdapter
from tests.engine.build import CPU

D, V = 32, 45  # rows of logits begin nowhere near 64 bytes
SIZES = (7, SLICE_ROWS + 40, 1, 16, 300)


def _head(dtype: torch.dtype, softcap: float | None) -> Head:
    return Head(torch.randn(V, D, generator=torch.Generator().manual_seed(1)).to(dtype), None, softcap)


def _dispatch(head: Head, start: int, size: int, *, dropout: float = 0.0) -> Dispatch:
    adapter = LoraAdapter(
        [head], r=5, scale=0.7, dropout=dropout, seed=size, dtype=head.weight_VD.dtype, device=CPU
    )  # fmt: skip
    b_VR = adapter.parameters.views["lm_head.lora_B"]
    with torch.no_grad():
        b_VR.copy_(torch.randn(b_VR.shape, generator=torch.Generator().manual_seed(size)))
    place_t = np.arange(size)
    return Dispatch(start, start + size, adapter, row_keys(3, 0, place_t * 0, place_t, CPU) if dropout else None)


def _rows(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + size)
    hidden = torch.randn(size, D, generator=generator).to(dtype)
    return hidden, torch.randint(V, (size,), generator=generator), torch.rand(size, generator=generator).to(dtype)


def _mixed(head: Head, plan: list[tuple[int, bool]], losses_of: object, dropout: float = 0.0) -> dict[int, object]:
    """Sweep over tasks of these sizes, one after another, with an adapter each or none; per size what it came to."""
    parts = [_rows(size, head.weight_VD.dtype) for size, _ in plan]
    hidden, target, weight = (torch.cat(columns) for columns in zip(*parts, strict=True))
    starts = np.cumsum([0, *(size for size, _ in plan)]).tolist()
    dispatches = [
        _dispatch(head, start, size, dropout=dropout)
        for start, (size, adapted) in zip(starts, plan, strict=False)
        if adapted
    ]
    found = losses_of(head, hidden, target, weight, hooked_rows(dispatches, head))  # type: ignore[operator]
    gradients = {item.stop - item.start: item.adapter.parameters.gradient for item in dispatches}
    return {
        size: (_part(found, slice(start, start + size)), gradients.get(size))
        for start, (size, _) in zip(starts, plan, strict=False)
    }


def _part(found: TokenLosses, rows: slice) -> tuple[Tensor, ...]:
    assert found.grad_ND is not None
    return found.logprob_N[rows], found.correct_N[rows], found.grad_ND[rows]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_losses_and_gradients_are_those_of_the_formula(softcap: float | None) -> None:
    head = _head(torch.float64, softcap)
    size = SLICE_ROWS + 40
    dispatch = _dispatch(head, 0, size)
    hidden, target, weight = _rows(size, torch.float64)
    found = token_losses(head, hidden, target, weight, hooked_rows([dispatch], head))
    a, b = (value.clone().requires_grad_() for value in dispatch.adapter.state().values())
    hidden.requires_grad_()
    logits = F.linear(hidden, head.weight_VD + 0.7 * b @ a)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprob = logits.log_softmax(-1)[torch.arange(size), target]
    (-logprob * weight).sum().backward()
    torch.testing.assert_close(found.logprob_N, logprob.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.grad_ND, hidden.grad, rtol=1e-10, atol=1e-12)
    views = dispatch.adapter.parameters.views
    torch.testing.assert_close(views["lm_head.lora_A"].grad, a.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(views["lm_head.lora_B"].grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_bit_of_a_task_depends_on_its_company(softcap: float | None, dtype: torch.dtype, dropout: float) -> None:
    head = _head(dtype, softcap)
    for plan in (
        [(7, True), (SLICE_ROWS + 40, True), (1, True), (16, False), (300, True)],
        [(300, True), (16, False), (7, True)],
        [(16, False), (1, True), (SLICE_ROWS + 40, True)],
    ):
        for size, (rows, gradient) in _mixed(head, plan, token_losses, dropout).items():  # type: ignore[misc]
            alone = [(size, adapted) for other, adapted in plan if other == size]
            (own_rows, own_gradient) = _mixed(head, alone, token_losses, dropout)[size]  # type: ignore[misc]
            assert all(torch.equal(one, other) for one, other in zip(rows, own_rows, strict=True))
            assert gradient is own_gradient is None or (torch.equal(gradient, own_gradient) and bool(gradient.any()))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_twin_agrees(softcap: float | None) -> None:
    head = _head(torch.float64, softcap)
    plan = [(7, True), (16, False), (SLICE_ROWS + 40, True), (1, True)]
    fast, plain = (_mixed(head, plan, losses_of, 0.3) for losses_of in (token_losses, token_losses_plain))
    for size in fast:
        (rows, gradient), (twin_rows, twin_gradient) = fast[size], plain[size]  # type: ignore[misc]
        for one, other in zip(rows, twin_rows, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(gradient, twin_gradient, rtol=1e-11, atol=1e-12)
    hidden, _, _ = _rows(23, torch.float64)
    hooked = hooked_rows([_dispatch(head, 2, 7), _dispatch(head, 11, 5)], head)
    torch.testing.assert_close(
        head.logits(hidden, hooked), head.logits_plain(hidden, hooked).detach(), rtol=1e-12, atol=1e-12
    )


_shares = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 700)), max_size=6)


@given(_shares, st.integers(0, 600))
def test_slices_hold_every_row_once_and_pieces_follow_from_their_own_rows(
    shares: list[tuple[int, int]], rest: int
) -> None:
    hooked, at = [], 0
    for gap, size in shares:
        hooked.append(HeadRows(at + gap, at + gap + size, object()))  # type: ignore[arg-type]
        at += gap + size
    total = at + rest
    slices = cut(total, hooked)
    rows = np.concatenate([part.index_n for part in slices]) if slices else np.empty(0, int)
    assert sorted(rows[rows < total].tolist()) == list(range(total))
    assert all(len(part.index_n) <= SLICE_ROWS and len(part.index_n) % ROW_MULTIPLE == 0 for part in slices)
    for share in hooked:
        size = share.stop - share.start
        pieces = [(part, piece) for part in slices for piece in part.pieces if piece.hook is share.hook]
        assert [piece.rows.start for _, piece in pieces] == list(range(0, size, SLICE_ROWS))
        for part, piece in pieces:
            own = part.index_n[piece.at]
            count = piece.rows.stop - piece.rows.start
            assert piece.at.start % ROW_MULTIPLE == 0 and len(own) == count + -count % ROW_MULTIPLE
            assert own[:count].tolist() == list(range(share.start + piece.rows.start, share.start + piece.rows.stop))
            assert set(own[count:].tolist()) <= {total}
