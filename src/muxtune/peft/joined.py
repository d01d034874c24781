"""Linears that run as one product (`JoinedLinears`), and the adapters at each of them.

One autograd node for all members: the product runs once on the rows of all tasks, each module aggregates into its
member's columns of its own rows, and in the backward pass one product gives the input gradient. The steps are those of
`muxtune.peft.multiplex`. A module that has its BaseOp see other rows (IA3 on an input) cannot have them from the shared
product: its own rows run through its member once more, forward and backward, and in their place the product's gradient
is zero. That is decided by its own rows alone, so neighbours keep their bits.

Legend: T rows of a micro-batch, t rows of one task, I input features, O output features of a member, X of all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muxtune.peft.base import HandWritten, JoinedLinears, Kept, LinearBase
from muxtune.peft.shares import Share, Shares


@dataclass(frozen=True, slots=True)
class Lane:
    """What happens at member `member` of a group."""

    member: int
    shares: Shares


@dataclass(frozen=True, slots=True)
class _Turn:
    """One module in one pass."""

    lane: int
    op: LinearBase
    share: Share
    steps: HandWritten


def apply_joined(op: JoinedLinears, x_TI: Tensor, lanes: Sequence[Lane]) -> Tensor:
    """[T, I] -> [T, X], with all modules at the members."""
    anchor = lanes[0].shares.members[0].module.parameters[0]
    training = torch.is_grad_enabled()
    y_TX: Tensor = _Joined.apply(x_TI, anchor, op, lanes, training)  # type: ignore[no-untyped-call]
    return y_TX


def apply_joined_plain(op: JoinedLinears, x_TI: Tensor, lanes: Sequence[Lane]) -> Tensor:
    """The twin through autograd."""
    columns = list(op.forward(x_TI).split([member.out_features for member in op.members], dim=1))
    for lane in lanes:
        member, shares = op.members[lane.member], lane.shares
        x_parts, y_parts = shares.split(x_TI), list(shares.split(columns[lane.member]))
        for share in shares.members:
            module, x_tI = share.module, x_parts[share.part]
            base_tO = y_parts[share.part]
            if module.changes_input:
                base_tO = member.forward(module.input_rows(x_tI, share.keys))
            y_parts[share.part] = module.forward_plain(x_tI, base_tO, share.keys)
        columns[lane.member] = torch.cat(y_parts)
    return torch.cat(columns, dim=1)


class _Joined(torch.autograd.Function):
    """As `muxtune.peft.multiplex` has it for one linear; parameters' gradients are written in `backward`."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, anchor: Tensor, op: JoinedLinears, lanes: Sequence[Lane], training: bool
    ) -> Tensor:
        y_TX = op.forward(x_TI)
        turns = [
            _Turn(index, op.members[lane.member], share, share.steps(training))
            for index, lane in enumerate(lanes)
            for share in lane.shares.members
        ]
        x_parts, y_parts = [lane.shares.split(x_TI) for lane in lanes], _parts(y_TX, op, lanes)
        ctx.kept = []
        for turn in turns:
            x_tI, y_tO = x_parts[turn.lane][turn.share.part], y_parts[turn.lane][turn.share.part]
            if turn.steps.changes_input:
                y_tO.copy_(turn.op.forward(turn.steps.input_rows(x_tI, turn.share.keys)))
            ctx.kept.append(turn.steps.forward_rows(x_tI, y_tO, turn.share.keys))
        ctx.save_for_backward(x_TI)
        ctx.op, ctx.lanes, ctx.turns = op, lanes, turns
        return y_TX

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_y_TX,) = grads
        (x_TI,) = ctx.saved_tensors
        lanes: Sequence[Lane] = ctx.lanes
        turns: list[_Turn] = ctx.turns
        if any(turn.steps.rescales or turn.steps.changes_input for turn in turns):
            grad_y_TX = grad_y_TX.clone(memory_format=torch.contiguous_format)  # others may hold this gradient too
        x_parts, grad_y_parts = [lane.shares.split(x_TI) for lane in lanes], _parts(grad_y_TX, ctx.op, lanes)
        kept: list[Kept] = []
        own: dict[int, Tensor] = {}  # input gradients of the rows that the shared product did not see
        for number, (turn, was) in enumerate(zip(turns, ctx.kept, strict=True)):
            x_tI, grad_y_tO = x_parts[turn.lane][turn.share.part], grad_y_parts[turn.lane][turn.share.part]
            kept.append(turn.steps.backward_output(x_tI, was, grad_y_tO, turn.share.keys))
            if turn.steps.changes_input:
                own[number] = turn.op.input_gradient(grad_y_tO)
                grad_y_tO.zero_()
        grad_x_TI = ctx.op.input_gradient(grad_y_TX) if ctx.needs_input_grad[0] else None
        grad_x_parts = [lane.shares.split(grad_x_TI) for lane in lanes] if grad_x_TI is not None else None
        for number, (turn, was) in enumerate(zip(turns, kept, strict=True)):
            x_tI = x_parts[turn.lane][turn.share.part]
            grad_x_tI = grad_x_parts[turn.lane][turn.share.part] if grad_x_parts is not None else None
            if number in own:
                turn.steps.backward_input(x_tI, was, own[number], turn.share.keys)
                if grad_x_tI is not None:
                    grad_x_tI += own[number]
            elif grad_x_tI is not None:
                turn.steps.backward_input(x_tI, was, grad_x_tI, turn.share.keys)
        return grad_x_TI, None, None, None, None


def _parts(rows_TX: Tensor, op: JoinedLinears, lanes: Sequence[Lane]) -> list[tuple[Tensor, ...]]:
    """The lanes' columns, each in the parts of its shares."""
    columns = rows_TX.split([member.out_features for member in op.members], dim=1)
    return [lane.shares.split(columns[lane.member]) for lane in lanes]
