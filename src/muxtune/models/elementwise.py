"""What lies between the linears of a LLaMA layer - norms, rotary positions, SwiGLU, residual additions - by hand.

Each is one autograd node over packed rows that keeps little and writes in place where nobody else reads. No weight
gradient exists. Where a residual stream branches into a norm, both gradients meet in one node.

    add_rms_norm   x' = x + d, n = x' / rms(x') * w     keeps x' and 1/rms; writes x' over d
    heads          q, k, v of [T, (H+2G)K], rotated     keeps nothing; in place (with norms of heads: keeps q and k as
                                                        they came, and 1/rms of each head)
    swiglu         silu(g) * u of [g u]                 keeps [g u]

Arithmetic is transformers': a norm is taken in at least fp32, rounded to the rows' precision and then scaled. Each
row's result depends on that row alone.

What is written over is a linear's output, which neither autograd nor any adapter keeps: it is done behind autograd's
back (`data`), which has no graph for several outputs of a node that share an input's memory. A gradient that comes in
may be read by others as well, so none is written over.

Legend: T packed rows, D model, F ffn, H query heads, G key/value heads, K head dim, X whatever a norm is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """A frozen norm: weight [X] and what is added to the mean square."""

    weight_X: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How many query heads and key/value heads, and how wide; `q_norm`, `k_norm` where each head is normalised."""

    queries: int
    keys: int
    width: int
    q_norm: RmsNorm | None = None
    k_norm: RmsNorm | None = None


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm), [T, D] each; delta, if any, is written over."""
    both: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x_TD, delta_TD, norm)  # type: ignore[no-untyped-call]
    return both


def rms_norm(x_X: Tensor, weight_X: Tensor, epsilon: float) -> Tensor:
    """The norm alone, through autograd, for a weight that trains: the same arithmetic to the bit."""
    wide_X = x_X.to(torch.promote_types(x_X.dtype, torch.float32))
    squares_1: Tensor = torch.linalg.vector_norm(wide_X, dim=-1, keepdim=True).square()
    normed_X: Tensor = wide_X * (squares_1 / x_X.shape[-1] + epsilon).rsqrt()
    y_X: Tensor = normed_X.to(x_X.dtype) * weight_X
    return y_X


def heads(qkv_TO: Tensor, cos_TK: Tensor, sin_TK: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [1, H, T, K] and keys [1, G, T, K], normalised if they are to be and rotated, and values [1, G, T, K].

    `qkv_TO`, [T, (H + 2G) K] contiguous, is written over: the three are views of it.
    """
    three: tuple[Tensor, Tensor, Tensor] = _Heads.apply(qkv_TO, cos_TK, sin_TK, shape)  # type: ignore[no-untyped-call]
    return three


def swiglu(both_T2F: Tensor) -> Tensor:
    """silu(gate) * up [T, F] of [gate, up], [T, 2F]."""
    y_TF: Tensor = _SwiGlu.apply(both_T2F)  # type: ignore[no-untyped-call]
    return y_TF


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, delta_TD: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        if delta_TD is not None:
            x_TD = delta_TD.data.add_(x_TD)
        y_TD, inverse_T1 = _normalised(x_TD, norm)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, inverse_T1)
        ctx.norm = norm
        return x_TD, y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        past_TD, grad_TD = grads
        x_TD, inverse_T1 = ctx.saved_tensors
        if grad_TD is not None:
            past_TD = _norm_gradient(grad_TD, x_TD, inverse_T1, ctx.norm, past_TD)
        return past_TD, past_TD if ctx.needs_input_grad[1] else None, None


def _normalised(x_X: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """The norm over the last dimension, and 1 / rms [..., 1] in at least fp32."""
    wide_X = x_X.to(torch.promote_types(x_X.dtype, torch.float32))
    # a norm reads its rows once; square and mean write them first
    inverse_1 = torch.linalg.vector_norm(wide_X, dim=-1, keepdim=True)
    inverse_1 = inverse_1.square_().div_(x_X.shape[-1]).add_(norm.epsilon).rsqrt_()
    return (wide_X * inverse_1).to(x_X.dtype).mul_(norm.weight_X), inverse_1


def _norm_gradient(grad_X: Tensor, x_X: Tensor, inverse_1: Tensor, norm: RmsNorm, past_X: Tensor | None) -> Tensor:
    """dL/dx = r g' - r^3 x (x . g') / X with g' = w g and r = 1 / rms, added to `past_X` if there is one."""
    wide = inverse_1.dtype
    x_X, own_X = x_X.to(wide), (grad_X * norm.weight_X).to(wide)
    found_X = own_X * x_X
    along_1 = found_X.sum(-1, keepdim=True).mul_(inverse_1.pow(3).div_(-x_X.shape[-1]))
    if past_X is None:
        torch.mul(own_X, inverse_1, out=found_X)
    else:
        torch.addcmul(past_X.to(wide), own_X, inverse_1, out=found_X)
    return found_X.addcmul_(x_X, along_1).to(grad_X.dtype)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TO: Tensor, cos_TK: Tensor, sin_TK: Tensor, shape: HeadShape
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows_TNK = qkv_TO.data.view(len(qkv_TO), -1, shape.width)
        q_THK, k_TGK, v_TGK = _by_role(rows_TNK, shape)
        kept: tuple[Tensor, ...] = ()
        if shape.q_norm is not None and shape.k_norm is not None:
            (new_q, inverse_q), (new_k, inverse_k) = _normalised(q_THK, shape.q_norm), _normalised(k_TGK, shape.k_norm)
            kept = (q_THK, inverse_q, k_TGK, inverse_k)
            q_THK, k_TGK = new_q, new_k
            _rotate(q_THK, cos_TK, sin_TK)
            _rotate(k_TGK, cos_TK, sin_TK)
        else:
            _rotate(rows_TNK[:, : shape.queries + shape.keys], cos_TK, sin_TK)
        ctx.save_for_backward(cos_TK, sin_TK, *kept)
        ctx.shape = shape
        q_1HTK, k_1GTK, v_1GTK = (rows.transpose(0, 1)[None] for rows in (q_THK, k_TGK, v_TGK))
        return q_1HTK, k_1GTK, v_1GTK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_q_THK, grad_k_TGK, grad_v_TGK = (grad[0].transpose(0, 1) for grad in grads)
        cos_TK, sin_TK, *kept = ctx.saved_tensors
        shape: HeadShape = ctx.shape
        count = shape.queries + 2 * shape.keys
        found_TNK = grad_q_THK.new_empty(len(grad_q_THK), count, shape.width)
        q_THK, k_TGK, v_TGK = _by_role(found_TNK, shape)
        _rotated_back(grad_q_THK, cos_TK, sin_TK, q_THK)
        _rotated_back(grad_k_TGK, cos_TK, sin_TK, k_TGK)
        v_TGK.copy_(grad_v_TGK)
        if kept:
            x_q, inverse_q, x_k, inverse_k = kept
            assert shape.q_norm is not None and shape.k_norm is not None
            q_THK.copy_(_norm_gradient(q_THK, x_q, inverse_q, shape.q_norm, None))
            k_TGK.copy_(_norm_gradient(k_TGK, x_k, inverse_k, shape.k_norm, None))
        return found_TNK.flatten(1), None, None, None


def _by_role(rows_TNK: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    q_THK, k_TGK, v_TGK = rows_TNK.split((shape.queries, shape.keys, shape.keys), dim=1)
    return q_THK, k_TGK, v_TGK


def _halves(rows_TX: Tensor) -> tuple[Tensor, Tensor]:
    first, second = rows_TX.chunk(2, dim=-1)
    return first, second


def _rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> None:
    """x cos + rotate_half(x) sin, in place: (a, b) -> (a c - b s, b c + a s)."""
    a, b = _halves(x_THK)
    (c1, c2), (s1, s2) = _halves(cos_TK[:, None]), _halves(sin_TK[:, None])
    turned = a * s2
    a.mul_(c1).addcmul_(b, s1, value=-1)
    b.mul_(c2).add_(turned)


def _rotated_back(grad_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, out_THK: Tensor) -> None:
    """The transpose of `_rotate`, written to `out_THK`."""
    (a, b), (out_a, out_b) = _halves(grad_THK), _halves(out_THK)
    (c1, c2), (s1, s2) = _halves(cos_TK[:, None]), _halves(sin_TK[:, None])
    torch.mul(a, c1, out=out_a)
    out_a.addcmul_(b, s2)
    torch.mul(b, c2, out=out_b)
    out_b.addcmul_(a, s1, value=-1)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = _halves(both_T2F)
        ctx.save_for_backward(both_T2F)
        return F.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_TF,) = grads
        (both_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = _halves(both_T2F)
        found_T2F = torch.empty_like(both_T2F)
        grad_gate_TF, grad_up_TF = _halves(found_T2F)
        torch.mul(grad_TF, up_TF, out=grad_gate_TF)
        torch.ops.aten.silu_backward.grad_input(grad_gate_TF, gate_TF, grad_input=grad_gate_TF)
        torch.ops.aten.silu.out(gate_TF, out=grad_up_TF)
        grad_up_TF.mul_(grad_TF)
        return found_T2F
