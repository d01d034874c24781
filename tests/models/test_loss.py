"""The sliced head and its hand-made gradient against whole logits, cross-entropy and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muxtune.models.loss import SLICE_ROWS, Head, TokenLosses, token_losses, token_losses_plain

D, V = 24, 50
COUNTS = (0, 1, 15, 16, 17, SLICE_ROWS - 1, SLICE_ROWS, SLICE_ROWS + 1, 2 * SLICE_ROWS + 40)


def _head(dtype: torch.dtype, softcap: float | None = None, bias: bool = False) -> Head:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    return Head(weight, torch.randn(V, generator=generator).to(dtype) if bias else None, softcap)


def _rows(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, D, generator=generator).to(dtype)
    target = torch.randint(V, (count,), generator=generator)
    return hidden, target, torch.rand(count, generator=generator).to(torch.promote_types(dtype, torch.float32))


def _by_hand(head: Head, hidden: Tensor, target: Tensor, weight: Tensor) -> TokenLosses:
    hidden = hidden.clone().requires_grad_()
    logits = F.linear(hidden, head.weight_VD, head.bias_V)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprob = logits.log_softmax(-1)[torch.arange(len(target)), target]
    (grad,) = torch.autograd.grad((-logprob * weight).sum(), hidden)
    return TokenLosses(logprob.detach(), logits.argmax(-1) == target, grad)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_are_those_of_the_formula(count: int, softcap: float | None, bias: bool) -> None:
    head = _head(torch.float64, softcap, bias)
    hidden, target, weight = _rows(count, torch.float64)
    expected = _by_hand(head, hidden, target, weight)
    for losses_of in (token_losses, token_losses_plain):
        found = losses_of(head, hidden, target, weight)
        assert torch.allclose(found.logprob_N, expected.logprob_N, rtol=1e-12, atol=1e-13)
        assert torch.equal(found.correct_N, expected.correct_N)
        assert found.grad_ND is not None and found.grad_ND.shape == (count, D)
        assert torch.allclose(found.grad_ND, expected.grad_ND, rtol=1e-11, atol=1e-13)
        without = losses_of(head, hidden, target, None)
        assert without.grad_ND is None and torch.equal(without.logprob_N, found.logprob_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_twin_agrees_in_lower_precision(dtype: torch.dtype, softcap: float | None) -> None:
    head = _head(dtype, softcap)
    hidden, target, weight = _rows(300, dtype)
    fast, plain = (losses_of(head, hidden, target, weight) for losses_of in (token_losses, token_losses_plain))
    assert fast.logprob_N.dtype == plain.logprob_N.dtype == torch.float32
    assert torch.allclose(fast.logprob_N, plain.logprob_N, rtol=1e-5, atol=1e-5)
    assert fast.grad_ND is not None and plain.grad_ND is not None and fast.grad_ND.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(fast.grad_ND, plain.grad_ND, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_row_has_the_same_bits_whatever_rows_stand_around_it(dtype: torch.dtype, softcap: float | None) -> None:
    head = _head(dtype, softcap)
    hidden, target, weight = _rows(600, dtype)
    whole = token_losses(head, hidden, target, weight)
    for start, stop in ((0, 3), (250, 262), (590, 600), (100, 500)):
        rows = slice(start, stop)
        part = token_losses(head, hidden[rows], target[rows], weight[rows])
        assert torch.equal(part.logprob_N, whole.logprob_N[rows])
        assert part.grad_ND is not None and whole.grad_ND is not None
        assert torch.equal(part.grad_ND, whole.grad_ND[rows])


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    head = _head(torch.float32)
    hidden, target, weight = _rows(40, torch.float32)
    whole = token_losses(head, hidden, target, weight)
    hidden = hidden.clone()
    hidden[7] = float("nan")
    hidden[9] = float("inf")
    spoilt = token_losses(head, hidden, target, weight)
    others = torch.tensor([row for row in range(40) if row not in (7, 9)])
    assert spoilt.logprob_N[7].isnan() and not spoilt.logprob_N[9].isfinite()
    assert torch.equal(spoilt.logprob_N[others], whole.logprob_N[others])
    assert spoilt.grad_ND is not None and whole.grad_ND is not None
    assert torch.equal(spoilt.grad_ND[others], whole.grad_ND[others])


class _Widest(TorchDispatchMode):
    """The most rows that any tensor as wide as the vocabulary had."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == V:
            self.rows = max(self.rows, result.shape[0])
        return result


def test_logits_never_exist_for_more_than_a_slice_of_rows() -> None:
    hidden, target, weight = _rows(3 * SLICE_ROWS + 5, torch.float32)
    with _Widest() as seen:
        token_losses(_head(torch.float32), hidden, target, weight)
    assert seen.rows == SLICE_ROWS
