"""One BaseOp, many adapters: the shared operator runs once on the rows of all tasks, each adapter on its own slice.

`hooks` turns the dispatches of a micro-batch into one hook an attach point. At a linear, and at the token embedding
(whose rows are ids and have no gradient), the fast path is a single autograd node: its forward runs the frozen operator
and lets each module aggregate, in place; its backward computes the input gradient once and writes parameter gradients
straight into the tasks' buffers. The steps are those of `muxtune.peft.base.HandWritten`; a module that does not come by
hand is dressed as one (`muxtune.peft.traced`). Linears that the backbone runs as one product are one node together
(`muxtune.peft.joined`). Norms and sublayers have no closed-form backward here and stay under autograd.

The twin (`plain=True`) says everything through autograd with split and concatenation.

Legend: T rows of a micro-batch, t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from muxtune.peft.base import BaseOp, Dispatch, HandWritten, JoinedLinears, LinearBase
from muxtune.peft.grouped import Rule, measured, never
from muxtune.peft.joined import Lane, apply_joined, apply_joined_plain
from muxtune.peft.shares import Shares, shares

Hook = Callable[[BaseOp, Tensor], Tensor]


def hooks(
    dispatches: Sequence[Dispatch],
    *,
    plain: bool = False,
    grouping: Rule = measured,
    joined: Sequence[JoinedLinears] = (),
) -> dict[str, Hook]:
    """Attach point -> hook, for the attach points that any of the adapters hooks. Dispatched rows must not overlap.

    `grouping` says where modules of a kind run as one (`muxtune.peft.grouped`); the plain twin knows no such thing.
    `joined` are the linears that the backbone runs as one: they have one hook, by the group's name.
    """
    ordered = sorted(dispatches, key=lambda item: item.start)
    assert all(item.start < item.stop for item in ordered), "dispatched rows overlap, or there are none"
    assert all(one.stop <= other.start for one, other in pairwise(ordered)), "dispatched rows overlap"
    at_point: dict[str, list[Dispatch]] = {}
    for dispatch in ordered:
        for name in dispatch.adapter.modules:
            at_point.setdefault(name, []).append(dispatch)
    apply, rule = (_apply_plain, never) if plain else (_apply, grouping)
    found = _joined_hooks(at_point, joined, rule, plain=plain) if joined else {}
    return found | {name: _hook(partial(shares, name, present, rule), apply) for name, present in at_point.items()}


def _joined_hooks(
    at_point: dict[str, list[Dispatch]], joined: Sequence[JoinedLinears], rule: Rule, *, plain: bool
) -> dict[str, Hook]:
    """Those of the groups; takes the members out of `at_point`."""
    found: dict[str, Hook] = {}
    for group in joined:
        here = [(index, member.name) for index, member in enumerate(group.members) if member.name in at_point]
        if here:
            found[group.name] = _joined_hook([(index, name, at_point.pop(name)) for index, name in here], rule, plain)
    return found


def _joined_hook(hooked: Sequence[tuple[int, str, Sequence[Dispatch]]], rule: Rule, plain: bool) -> Hook:
    """`hooked`: index among the members, attach point, dispatches."""
    found = cache(lambda: [Lane(index, shares(name, present, rule)) for index, name, present in hooked])
    apply = apply_joined_plain if plain else apply_joined

    def hook(op: BaseOp, x_TI: Tensor) -> Tensor:
        return apply(cast("JoinedLinears", op), x_TI, found())

    return hook


def _hook(shares: Callable[[], Shares], apply: Callable[[BaseOp, Tensor, Shares], Tensor]) -> Hook:
    """Nothing is shared out at an attach point that the pass does not come to (the head)."""
    found = cache(shares)

    def hook(op: BaseOp, x_TI: Tensor) -> Tensor:
        return apply(op, x_TI, found())

    return hook


def _apply(op: BaseOp, x_TI: Tensor, shares: Shares) -> Tensor:
    if op.kind not in ("linear", "embedding"):
        return _apply_plain(op, x_TI, shares)
    anchor = shares.members[0].module.parameters[0]
    training = torch.is_grad_enabled()
    y_TO: Tensor = _Multiplexed.apply(x_TI, anchor, op, shares, training)  # type: ignore[no-untyped-call]
    return y_TO


class _Multiplexed(torch.autograd.Function):
    """The fused node. `anchor` is any one of the parameters, an argument only so that autograd knows that the output
    depends on trained values even where the input does not; all parameters' gradients are written in `backward`."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, anchor: Tensor, op: LinearBase, shares: Shares, training: bool) -> Tensor:
        x_parts = shares.split(x_TI)
        steps = [share.steps(training) for share in shares.members]
        seen = {
            share.part: step.input_rows(x_parts[share.part], share.keys)
            for share, step in zip(shares.members, steps, strict=True)
            if step.changes_input
        }
        y_TO = op.forward(torch.cat([seen.get(i, part) for i, part in enumerate(x_parts)]) if seen else x_TI)
        y_parts = shares.split(y_TO)
        ctx.kept = [
            step.forward_rows(x_parts[share.part], y_parts[share.part], share.keys)
            for share, step in zip(shares.members, steps, strict=True)
        ]
        ctx.save_for_backward(x_TI)
        ctx.op, ctx.shares, ctx.steps = op, shares, steps
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_y_TO,) = grads
        (x_TI,) = ctx.saved_tensors
        shares: Shares = ctx.shares
        steps: list[HandWritten] = ctx.steps
        if any(step.rescales for step in steps):
            grad_y_TO = grad_y_TO.clone(memory_format=torch.contiguous_format)  # others may hold this gradient too
        x_parts, grad_y_parts = shares.split(x_TI), shares.split(grad_y_TO)
        members = list(zip(shares.members, steps, strict=True))
        kept = [
            step.backward_output(x_parts[share.part], own, grad_y_parts[share.part], share.keys)
            for (share, step), own in zip(members, ctx.kept, strict=True)
        ]
        if not ctx.needs_input_grad[0] and not any(step.changes_input for step in steps):
            return None, None, None, None, None
        grad_x_TI = ctx.op.input_gradient(grad_y_TO)
        grad_x_parts = shares.split(grad_x_TI)
        for (share, step), own in zip(members, kept, strict=True):
            step.backward_input(x_parts[share.part], own, grad_x_parts[share.part], share.keys)
        return grad_x_TI if ctx.needs_input_grad[0] else None, None, None, None, None


def _apply_plain(op: BaseOp, x_TI: Tensor, shares: Shares) -> Tensor:
    x_parts = shares.split(x_TI)
    entries = {
        share.part: share.module.input_rows(x_parts[share.part], share.keys)
        for share in shares.members
        if share.module.changes_input
    }
    seen_TI = torch.cat([entries.get(i, part) for i, part in enumerate(x_parts)]) if entries else x_TI
    y_parts = list(shares.split(op.forward(seen_TI)))
    for share in shares.members:
        y_parts[share.part] = share.module.forward_plain(x_parts[share.part], y_parts[share.part], share.keys)
    return torch.cat(y_parts)
