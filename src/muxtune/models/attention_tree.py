"""Attention of sequences that begin alike: what they have in common is computed once, each rest sees it.

The rows of a tree lie one after another: a whole sequence, then the rests of others, each with the rows it sees before
itself - of the sequence, or of rests before it. Every branch is one call of attention, as a sequence alone is, on the
keys and values of what it sees and then of its own rows. The backward pass is the same calls once more, each pulled
through at once: what the branches owe to common rows adds up, in the order of the branches, and the joined keys and
values of a branch exist only while it is at work.

Cost: attention's scores are those of the rests alone; keys and values are copied once a branch and direction, and
attention runs forward twice. Kept are the rows that come in, as for a sequence alone.

Legend: T rows of the tree, S of a branch, N keys that it sees, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [1, H, S, K], k and v [1, G, N, K] -> [1, H, S, K]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Branch:
    """`rows` query rows, and the ranges of the tree's rows that they see before themselves."""

    rows: int
    seen: tuple[tuple[int, int], ...] = ()


def after(before: Sequence[Pair], k_1GSK: Tensor, v_1GSK: Tensor) -> Pair:
    """Keys and values of what comes before the rows and then theirs, in the rows' precision."""
    if not before:
        return k_1GSK, v_1GSK
    return (
        torch.cat([*(k.to(k_1GSK.dtype) for k, _ in before), k_1GSK], dim=2),
        torch.cat([*(v.to(v_1GSK.dtype) for _, v in before), v_1GSK], dim=2),
    )


def tree_attention(
    attend: Attend,
    branches: Sequence[Branch],
    q_1HTK: Tensor,
    k_1GTK: Tensor,
    v_1GTK: Tensor,
    before: Sequence[Pair] = (),
) -> Tensor:
    """[1, H, T, K]. `before`: keys and values that all branches see before anything else, [1, G, P, K] each."""
    learned = [tensor for pair in before for tensor in pair]
    found: Tensor = _Tree.apply(attend, branches, q_1HTK, k_1GTK, v_1GTK, *learned)  # type: ignore[no-untyped-call]
    return found


class _Tree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attend: Attend, branches: Sequence[Branch], *tensors: Tensor) -> Tensor:
        ctx.attend, ctx.branches = attend, branches
        ctx.save_for_backward(*tensors)
        q, k, v, *learned = tensors
        starts = _starts(branches)
        parts = [
            attend(q[:, :, start : start + one.rows], *_seen(one, start, k, v, learned))
            for start, one in zip(starts, branches, strict=True)
        ]
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_1HTK,) = grads
        q, k, v, *learned = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_learned = [torch.zeros_like(tensor) for tensor in learned]
        for start, branch in zip(_starts(ctx.branches), ctx.branches, strict=True):
            own = slice(start, start + branch.rows)
            leaves = [q[:, :, own], *_seen(branch, start, k, v, learned)]
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in leaves]
                mixed = ctx.attend(*leaves)
            own_q, own_k, own_v = torch.autograd.grad(mixed, leaves, grad_1HTK[:, :, own])
            grad_q[:, :, own] = own_q
            for whole, part, spans in ((grad_k, own_k, grad_learned[::2]), (grad_v, own_v, grad_learned[1::2])):
                _give_back(part, spans, [whole[:, :, a:b] for a, b in (*branch.seen, (start, own.stop))])
        return None, None, grad_q, grad_k, grad_v, *grad_learned


def _starts(branches: Sequence[Branch]) -> list[int]:
    starts = [0]
    for branch in branches[:-1]:
        starts.append(starts[-1] + branch.rows)
    return starts


def _seen(branch: Branch, start: int, k: Tensor, v: Tensor, learned: Sequence[Tensor]) -> Pair:
    """All that a branch sees, its own rows last."""
    ranges = [*branch.seen, (start, start + branch.rows)]
    parts = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ranges]
    before = [*zip(learned[::2], learned[1::2], strict=True), *parts[:-1]]
    return after(before, *parts[-1])


def _give_back(grad_1GNK: Tensor, spans: Sequence[Tensor], ranges: Sequence[Tensor]) -> None:
    """Add the gradient of what a branch saw to that of its parts, in place."""
    parts = [*spans, *ranges]
    for total, part in zip(parts, grad_1GNK.split([one.shape[2] for one in parts], dim=2), strict=True):
        total += part
