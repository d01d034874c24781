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
    """A module and the rows it gets: part `part` of the rows as `_Shares.sizes` splits them."""

    part: int
    module: AdapterModule
    keys: RowKeys | None


@dataclass(frozen=True, slots=True)
class _Shares:
    """What happens at one attach point. Rows are split once for all modules, those of nobody into parts of their own:
    a split costs a third of as many slices, and its backward is one concatenation. The last part is the rest."""

    sizes: tuple[int, ...]
    members: tuple[_Share, ...]

    def split(self, rows_TX: Tensor) -> tuple[Tensor, ...]:
        rest = rows_TX.shape[0] - sum(self.sizes)
        return rows_TX.split_with_sizes((*self.sizes, rest))


def hooks(dispatches: Sequence[Dispatch], *, plain: bool = False) -> dict[str, Hook]:
    """Attach point -> hook, for the attach points that any of the adapters hooks. Dispatched rows must not overlap."""
    ordered = sorted(dispatches, key=lambda item: item.start)
    at_point: dict[str, list[Dispatch]] = {}
    for dispatch in ordered:
        for name in dispatch.adapter.modules:
            at_point.setdefault(name, []).append(dispatch)
    apply = _apply_plain if plain else _apply
    return {name: _hook(_shares(name, present), apply) for name, present in at_point.items()}


def _shares(name: str, dispatches: Sequence[Dispatch]) -> _Shares:
    sizes: list[int] = []
    members: list[_Share] = []
    done = 0
    for dispatch in dispatches:
        assert done <= dispatch.start < dispatch.stop, "dispatched rows overlap"
        if dispatch.start > done:
            sizes.append(dispatch.start - done)
        sizes.append(dispatch.stop - dispatch.start)
        members.append(_Share(len(sizes) - 1, dispatch.adapter.modules[name], dispatch.keys))
        done = dispatch.stop
    return _Shares(tuple(sizes), tuple(members))


def _hook(shares: _Shares, apply: Callable[[BaseOp, Tensor, _Shares], Tensor]) -> Hook:
    def hook(op: BaseOp, x_TI: Tensor) -> Tensor:
        return apply(op, x_TI, shares)

    return hook


def _apply(op: BaseOp, x_TI: Tensor, shares: _Shares) -> Tensor:
    anchor = shares.members[0].module.parameters[0]
    y_TO: Tensor = _Multiplexed.apply(x_TI, anchor, op, shares)  # type: ignore[no-untyped-call]
    return y_TO


class _Multiplexed(torch.autograd.Function):
    """The fused node. `anchor` is any one of the parameters, an argument only so that autograd knows that the output
    depends on trained values even where the input does not; all parameters' gradients are written in `backward`."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, anchor: Tensor, op: BaseOp, shares: _Shares) -> Tensor:
        y_TO = op.forward(x_TI)
        x_parts, y_parts = shares.split(x_TI), shares.split(y_TO)
        ctx.saved = [
            share.module.forward_rows(x_parts[share.part], y_parts[share.part], share.keys) for share in shares.members
        ]
        ctx.save_for_backward(x_TI)
        ctx.op, ctx.shares = op, shares
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_y_TO,) = grads
        (x_TI,) = ctx.saved_tensors
        shares: _Shares = ctx.shares
        grad_x_TI: Tensor | None = ctx.op.input_gradient(grad_y_TO) if ctx.needs_input_grad[0] else None
        x_parts, grad_y_parts = shares.split(x_TI), shares.split(grad_y_TO)
        grad_x_parts = shares.split(grad_x_TI) if grad_x_TI is not None else None
        for share, saved in zip(shares.members, ctx.saved, strict=True):
            part = share.part
            grad_x_tI = grad_x_parts[part] if grad_x_parts is not None else None
            share.module.backward_rows(x_parts[part], saved, grad_y_parts[part], grad_x_tI, share.keys)
        return grad_x_TI, None, None, None


def _apply_plain(op: BaseOp, x_TI: Tensor, shares: _Shares) -> Tensor:
    x_parts, y_parts = shares.split(x_TI), list(shares.split(op.forward(x_TI)))
    for share in shares.members:
        y_parts[share.part] = share.module.forward_plain(x_parts[share.part], y_parts[share.part], share.keys)
    return torch.cat(y_parts)
