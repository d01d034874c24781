"""One BaseOp, many adapters: the shared operator runs once on the rows of all tasks, each adapter on its own slice.

`hooks` turns the dispatches of a micro-batch into one hook an attach point. The fast path is a single autograd node a
BaseOp: its forward runs the frozen operator and lets each module aggregate in place; its backward computes the input
gradient once, lets each module add to it, and writes parameter gradients straight into the tasks' buffers. The twin
(`plain=True`) says the same through autograd with split and concatenation.

Legend: T rows of a micro-batch, t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muxtune.peft.base import AdapterModule, BaseOp, Dispatch
from muxtune.peft.dropout import RowKeys

Hook = Callable[[BaseOp, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Share:
    """A module and the rows it gets."""

    start: int
    stop: int
    module: AdapterModule
    keys: RowKeys | None


def hooks(dispatches: Sequence[Dispatch], *, plain: bool = False) -> dict[str, Hook]:
    """Attach point -> hook, for the attach points that any of the adapters hooks. Dispatched rows must not overlap."""
    shares: dict[str, list[_Share]] = {}
    for dispatch in sorted(dispatches, key=lambda item: item.start):
        for name, module in dispatch.adapter.modules.items():
            shares.setdefault(name, []).append(_Share(dispatch.start, dispatch.stop, module, dispatch.keys))
    apply = _apply_plain if plain else _apply
    return {name: _hook(tuple(at_point), apply) for name, at_point in shares.items()}


def _hook(shares: tuple[_Share, ...], apply: Callable[[BaseOp, Tensor, tuple[_Share, ...]], Tensor]) -> Hook:
    def hook(op: BaseOp, x_TI: Tensor) -> Tensor:
        return apply(op, x_TI, shares)

    return hook


def _apply(op: BaseOp, x_TI: Tensor, shares: tuple[_Share, ...]) -> Tensor:
    leaves = [leaf for share in shares for leaf in share.module.parameters]
    y_TO: Tensor = _Multiplexed.apply(x_TI, op, shares, *leaves)  # type: ignore[no-untyped-call]
    return y_TO


class _Multiplexed(torch.autograd.Function):
    """The fused node. The leaves are arguments only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, op: BaseOp, shares: tuple[_Share, ...], *leaves: Tensor) -> Tensor:
        y_TO = op.forward(x_TI)
        ctx.saved = [
            share.module.forward_rows(x_TI[share.start : share.stop], y_TO[share.start : share.stop], share.keys)
            for share in shares
        ]
        ctx.save_for_backward(x_TI)
        ctx.op, ctx.shares = op, shares
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_y_TO,) = grads
        (x_TI,) = ctx.saved_tensors
        op: BaseOp = ctx.op
        grad_x_TI = op.input_gradient(grad_y_TO) if ctx.needs_input_grad[0] else None
        leaves = 0
        for share, saved in zip(ctx.shares, ctx.saved, strict=True):
            rows = slice(share.start, share.stop)
            grad_x_tI = grad_x_TI[rows] if grad_x_TI is not None else None
            share.module.backward_rows(x_TI[rows], saved, grad_y_TO[rows], grad_x_tI, share.keys)
            leaves += len(share.module.parameters)
        return grad_x_TI, None, None, *[None] * leaves


def _apply_plain(op: BaseOp, x_TI: Tensor, shares: tuple[_Share, ...]) -> Tensor:
    y_TO = op.forward(x_TI)
    parts: list[Tensor] = []
    done = 0
    for share in shares:
        parts.append(y_TO[done : share.start])
        rows = slice(share.start, share.stop)
        parts.append(share.module.forward_plain(x_TI[rows], y_TO[rows], share.keys))
        done = share.stop
    return torch.cat([*parts, y_TO[done:]])
