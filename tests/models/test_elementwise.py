"""The hand-written nodes between linears against transformers' own arithmetic and autograd's own gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from muxtune.models.elementwise import HeadShape, RmsNorm, add_rms_norm, heads, rms_norm, swiglu
from tests.exact import exact_fp64

T, D, FFN, H, G, K = 5, 12, 7, 3, 2, 8
EPSILON = 0.3  # large, so that it shows where it is left out


def _rows(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _norm(width: int, seed: int, dtype: torch.dtype = torch.float64) -> RmsNorm:
    return RmsNorm(_rows(seed, width, dtype=dtype), EPSILON)


def _theirs(norm: RmsNorm, x: Tensor) -> Tensor:
    module = LlamaRMSNorm(len(norm.weight_X), norm.epsilon)
    module.weight.data = norm.weight_X
    return module(x)


def _agree(
    ours: Callable[..., Sequence[Tensor]],
    theirs: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    tolerance: float = 1e-13,
) -> None:
    """Outputs, and the inputs' gradients of random ones. Inputs are copies that may be written over; gradients not."""
    found = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*(leaf * 1 for leaf in leaves))
        grads = [_rows(50 + index, *output.shape, dtype=output.dtype) for index, output in enumerate(outputs)]
        before = [grad.clone() for grad in grads]
        torch.autograd.backward(outputs, grads)
        assert all(map(torch.equal, grads, before)), "a gradient that others may read was written over"
        found.append([*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_norm_of_a_sum() -> None:
    norm = _norm(D, 1)
    with exact_fp64():
        _agree(
            lambda x, d: add_rms_norm(x, d, norm),
            lambda x, d: (x + d, _theirs(norm, x + d)),
            [_rows(2, T, D), _rows(3, T, D)],
        )
        _agree(lambda x: add_rms_norm(x, None, norm), lambda x: (x, _theirs(norm, x)), [_rows(2, T, D)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_norm_whose_weight_trains_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    norm, x = _norm(D, 1, dtype), _rows(2, T, D, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight_X, norm.epsilon), add_rms_norm(x, None, norm)[1])


def test_a_norm_whose_weight_trains_has_transformers_gradients() -> None:
    with exact_fp64():
        _agree(
            lambda x, w: (rms_norm(x, w, EPSILON),),
            lambda x, w: (w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)),),
            [_rows(2, T, D), _rows(3, D)],
        )


def test_a_norm_is_rounded_where_transformers_rounds_it() -> None:
    norm = _norm(D, 1, torch.bfloat16)
    _agree(
        lambda x, d: add_rms_norm(x, d, norm),
        lambda x, d: (x + d, _theirs(norm, x + d)),
        [_rows(2, T, D, dtype=torch.bfloat16), _rows(3, T, D, dtype=torch.bfloat16)],
        tolerance=2e-2,
    )


@pytest.mark.parametrize("used", [0, 1])
def test_either_branch_of_a_stream_may_be_unused(used: int) -> None:
    x = _rows(2, T, D).requires_grad_()
    outputs = add_rms_norm(x, None, _norm(D, 1))
    outputs[used].sum().backward()
    assert x.grad is not None and bool(x.grad.any()) and (used == 1 or torch.equal(x.grad, torch.ones(T, D).double()))


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
def test_heads_are_those_of_transformers(normed: bool) -> None:
    cos, sin = _rows(6, T, K), _rows(7, T, K)  # more than any rotation: each half has a table of its own
    norms = (_norm(K, 4), _norm(K, 5)) if normed else (None, None)
    shape = HeadShape(H, G, K, *norms)

    def theirs(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.view(1, T, -1, K) for part in qkv.split((H * K, G * K, G * K), dim=1))
        if normed:
            q, k = _theirs(norms[0], q), _theirs(norms[1], k)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return *apply_rotary_pos_emb(q, k, cos[None], sin[None]), v

    with exact_fp64():
        _agree(lambda qkv: heads(qkv, cos, sin, shape), theirs, [_rows(8, T, (H + 2 * G) * K)])


def test_heads_lie_where_their_rows_lay() -> None:
    qkv = _rows(8, T, (H + 2 * G) * K)
    for one in heads(qkv, _rows(6, T, K), _rows(7, T, K), HeadShape(H, G, K)):
        assert one.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


def test_swiglu() -> None:
    def theirs(both: Tensor) -> tuple[Tensor]:
        gate, up = both.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    _agree(lambda both: (swiglu(both),), theirs, [_rows(9, T, 2 * FFN)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(dtype: torch.dtype) -> None:
    width, head, some = 48, 16, slice(16, 32)
    norm, shape = _norm(width, 1, dtype), HeadShape(1, 1, head)
    x, d, g = (_rows(seed, 256, width, dtype=dtype) for seed in (2, 3, 4))
    cos, sin = _rows(6, 256, head, dtype=dtype), _rows(7, 256, head, dtype=dtype)

    def run(rows: slice) -> list[Tensor]:
        leaves = [one[rows].clone().requires_grad_() for one in (x, d)]
        stream, normed = add_rms_norm(leaves[0], leaves[1] * 1, norm)
        three = heads(normed * 1, cos[rows], sin[rows], shape)
        y = swiglu(normed)
        own = [one[None, None] for one in g[rows].split(head, dim=1)]
        torch.autograd.backward([stream, y, *three], [g[rows], g[rows, : width // 2], *own])
        return [stream.detach(), y.detach(), *(one[0, 0].detach() for one in three), *(leaf.grad for leaf in leaves)]

    for alone, beside in zip(run(some), run(slice(None)), strict=True):
        assert torch.equal(alone, beside[some])
