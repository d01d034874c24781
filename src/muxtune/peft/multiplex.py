"""One BaseOp, many adapters: the shared operator runs once on the rows of all tasks, each adapter on its own slice.

`hooks` turns the dispatches of a micro-batch into one hook an attach point. At a linear, and at the token embedding
(whose rows are ids and have no gradient), the fast path is a single
autograd node: its forward runs the frozen operator and lets each module aggregate; its backward computes the input
gradient once and writes parameter gradients straight into the tasks' buffers. Modules that add come as a hand-written
pair and work in place. Any other module keeps a small graph of its own between the node's forward and backward; its
backward first turns the gradient of what it made into that of the BaseOp's output, on its rows, before the shared
input gradient is computed. Norms and sublayers have no closed-form backward here and stay under autograd.

The twin (`plain=True`) says everything through autograd with split and concatenation.

Legend: T rows of a micro-batch, t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from muxtune.peft.base import AdapterModule, AdditiveModule, BaseOp, Dispatch, LinearBase
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
    def forward(ctx: Any, x_TI: Tensor, anchor: Tensor, op: LinearBase, shares: _Shares, training: bool) -> Tensor:
        x_parts = shares.split(x_TI)
        ctx.entries = {
            share.part: _graph(
                training, lambda x, share=share: share.module.input_rows(x, share.keys), x_parts[share.part]
            )
            for share in shares.members
            if share.module.changes_input
        }
        y_TO = op.forward(_replaced(x_parts, ctx.entries) if ctx.entries else x_TI)
        y_parts = shares.split(y_TO)
        ctx.saved = [_forward_share(share, x_parts, y_parts, training) for share in shares.members]
        ctx.save_for_backward(x_TI)
        ctx.op, ctx.shares = op, shares
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_y_TO,) = grads
        (x_TI,) = ctx.saved_tensors
        shares: _Shares = ctx.shares
        extra_tI: dict[int, Tensor] = {}
        if any(isinstance(saved, _Graph) for saved in ctx.saved):
            grad_y_TO = grad_y_TO.clone()
        grad_y_parts = shares.split(grad_y_TO)
        for share, saved in zip(shares.members, ctx.saved, strict=True):
            if isinstance(saved, _Graph):
                extra_tI[share.part], grad_y_tO = saved.pull(grad_y_parts[share.part], share.module.parameters)
                grad_y_parts[share.part].copy_(grad_y_tO)
        grad_x_TI: Tensor | None = None
        if ctx.needs_input_grad[0] or ctx.entries:
            grad_x_TI = ctx.op.input_gradient(grad_y_TO)
        x_parts = shares.split(x_TI)
        grad_x_parts = shares.split(grad_x_TI) if grad_x_TI is not None else None
        for share, saved in zip(shares.members, ctx.saved, strict=True):
            part = share.part
            grad_x_tI = grad_x_parts[part] if grad_x_parts is not None else None
            if part in ctx.entries and grad_x_tI is not None:
                (own_tI,) = ctx.entries[part].pull(grad_x_tI, share.module.parameters)
                grad_x_tI.copy_(own_tI)
            if isinstance(saved, _Graph):
                if grad_x_tI is not None:
                    grad_x_tI += extra_tI[part]
            else:
                module = cast("AdditiveModule", share.module)
                module.backward_rows(x_parts[part], saved, grad_y_parts[part], grad_x_tI, share.keys)
        return grad_x_TI if ctx.needs_input_grad[0] else None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Graph:
    """A module's own piece of graph, from detached inputs to its output."""

    inputs: tuple[Tensor, ...]
    output: Tensor

    def pull(self, grad: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
        """Add to the parameters' gradients; the gradients of the inputs."""
        found = torch.autograd.grad(self.output, [*self.inputs, *parameters], grad, allow_unused=True)
        for parameter, part in zip(parameters, found[len(self.inputs) :], strict=True):
            if part is not None:
                assert parameter.grad is not None
                parameter.grad += part
        return [
            torch.zeros_like(tensor) if part is None else part for tensor, part in zip(self.inputs, found, strict=False)
        ]


def _graph(training: bool, function: Callable[..., Tensor], *inputs: Tensor) -> _Graph:
    leaves = tuple(tensor.detach().requires_grad_(training) for tensor in inputs)
    with torch.set_grad_enabled(training):
        return _Graph(leaves, function(*leaves))


def _forward_share(
    share: _Share, x_parts: Sequence[Tensor], y_parts: Sequence[Tensor], training: bool
) -> Tensor | _Graph:
    """Aggregate one module into its output rows, in place; what its backward needs."""
    module, x_tI, y_tO = share.module, x_parts[share.part], y_parts[share.part]
    if module.additive:
        return cast("AdditiveModule", module).forward_rows(x_tI, y_tO, share.keys)
    # the graph keeps what it was computed from, and these rows are about to be written over
    graph = _graph(training, lambda x, y: module.forward_plain(x, y, share.keys), x_tI, y_tO.clone())
    y_tO.copy_(graph.output.detach())
    return graph


def _replaced(x_parts: Sequence[Tensor], entries: dict[int, _Graph]) -> Tensor:
    return torch.cat([entries[i].output.detach() if i in entries else part for i, part in enumerate(x_parts)])


def _apply_plain(op: BaseOp, x_TI: Tensor, shares: _Shares) -> Tensor:
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
