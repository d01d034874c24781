"""Recomputation: a block keeps its input rows only, and runs once more when its backward pass is due.

The forward pass runs the block under autograd on detached rows, as it always runs, and drops the graph: that costs
nothing but nodes, tells whether anything in the block or below it trains, and leaves no kernel the chance to choose
otherwise than without recomputation. The backward pass runs the block again from the same rows and pulls the gradient
through at once, into the rows and into the parameters it meets.

Results are equal to the last bit to those without it: the two graphs of a block are the same nodes in the same order,
gradients of parameters are only ever written in a backward pass, of which each block still has one, and what looks
random (dropout) is a pure function of keys. PyTorch's own checkpointing would not do: it swaps what autograd saves, but
fused nodes (`muxtune.peft.multiplex`) keep small graphs of their own beside that.

Cost: one more forward pass of every block that takes part in the backward pass; kept are L x [T, D], and one block's
graph at a time.

Legend: T packed tokens, D model, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BlockRun = Callable[[Tensor], Tensor]  # rows [T, D] -> rows [T, D]; asked twice, it must answer alike


def recomputed(run: BlockRun, x_TD: Tensor) -> Tensor:
    """`run(x_TD)`, to be run again by the backward pass. Only where gradients are on."""
    anchor = x_TD.new_empty(0, requires_grad=True)
    y_TD: Tensor = _Recomputed.apply(x_TD, anchor, run)  # type: ignore[no-untyped-call]
    return y_TD


class _Recomputed(torch.autograd.Function):
    """`anchor` is an argument only so that autograd asks for a backward pass where the rows need no gradient but
    something in the block trains; where nothing does, the output says so."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, anchor: Tensor, run: BlockRun) -> Tensor:
        with torch.enable_grad():
            y_TD = run(x_TD.detach().requires_grad_(ctx.needs_input_grad[0]))
        output_TD = y_TD.detach()
        if y_TD.requires_grad:
            ctx.run = run
            ctx.save_for_backward(x_TD)
        else:
            ctx.mark_non_differentiable(output_TD)
        return output_TD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_y_TD,) = grads
        (x_TD,) = ctx.saved_tensors
        leaf_TD = x_TD.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            y_TD = ctx.run(leaf_TD)
        torch.autograd.backward([y_TD], [grad_y_TD])
        return leaf_TD.grad, None, None
