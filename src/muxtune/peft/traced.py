"""A module that only autograd can differentiate, dressed as the steps of a hand-written one.

It keeps a small graph of its own for one pass, from detached inputs to what it made of them; each backward step pulls
a gradient through it. Cost: the graph's nodes, and a copy of the output rows, since the graph keeps what it was
computed from and those rows are written over.

Legend: t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from muxtune.peft.base import AdapterModule, Kept
from muxtune.peft.dropout import RowKeys


class Traced:
    """`module` in one pass; see `muxtune.peft.base.HandWritten`. `training` False keeps no graph."""

    rescales = True

    def __init__(self, module: AdapterModule, training: bool) -> None:
        self.changes_input = module.changes_input
        self._module = module
        self._training = training
        self._entry: _Graph | None = None
        self._exit: _Graph | None = None

    def input_rows(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        self._entry = _graph(self._training, lambda x: self._module.input_rows(x, keys), x_tI)
        return self._entry.output.detach()

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        own = _graph(self._training, lambda x, y: self._module.forward_plain(x, y, keys), x_tI, y_tO.clone())
        y_tO.copy_(own.output.detach())
        self._exit = own if self._training else None
        return ()

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        assert self._exit is not None, "a pass that kept no graph"
        own_tI, base_tO = self._exit.pull(grad_y_tO, self._module.parameters)
        grad_y_tO.copy_(base_tO)
        return (own_tI,)

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        if self._entry is not None:
            (seen_tI,) = self._entry.pull(grad_x_tI, self._module.parameters)
            grad_x_tI.copy_(seen_tI)
        (own_tI,) = kept
        grad_x_tI += own_tI


@dataclass(frozen=True, slots=True)
class _Graph:
    """From detached inputs to the output."""

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
