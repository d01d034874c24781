"""(IA)^3 (Liu et al., 2022): a learned vector l on an activation, starting at one.

    y = l * (W x + b)        keys, values and other targeted linears
    y = W (l * x) + b        feed-forward ones: the BaseOp sees other rows

Products are in the adapter's precision and rounded once, as in peft. The gradient of an l on the output needs W x + b
as it was: a copy of the task's own rows is kept, since l may be zero, where y / l is nothing, and W x a second time
would cost as much as the BaseOp.

Legend: t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muxtune.peft.base import Adapter, BaseOp, Kept, PlainModule
from muxtune.peft.dropout import RowKeys
from muxtune.peft.parameters import FlatParameters


class _Scale(PlainModule):
    """One vector at one attach point."""

    by_hand = True

    def __init__(self, scale_X: Tensor) -> None:
        assert scale_X.grad is not None
        super().__init__(scale_X)
        self._scale_X, self._grad_X = scale_X.detach(), scale_X.grad

    def _pull(self, rows_tX: Tensor, grad_tX: Tensor) -> None:
        """From the gradient of l * rows: l's own, and then, in place, that of the rows."""
        self._grad_X += torch.mul(grad_tX.to(self._grad_X.dtype), rows_tX).sum(0)
        _multiply(grad_tX, self._scale_X)


class OutputScale(_Scale):
    """l on the BaseOp's output."""

    rescales = True

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        (scale_O,) = self.parameters
        return (y_tO * scale_O).to(y_tO.dtype)

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """y *= l; keeps y as it was."""
        before_tO = y_tO.clone()
        _multiply(y_tO, self._scale_X)
        return (before_tO,)

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        (before_tO,) = kept
        self._pull(before_tO, grad_y_tO)
        return ()

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        """The BaseOp's is all there is."""


class InputScale(_Scale):
    """l on the BaseOp's input; its output is left as it is."""

    changes_input = True

    def input_rows(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        (scale_I,) = self.parameters
        return (x_tI * scale_I).to(x_tI.dtype)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        return y_tO

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        return ()

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        return ()

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        self._pull(x_tI, grad_x_tI)


def _multiply(rows_tX: Tensor, scale_X: Tensor) -> None:
    """In place; rounded once where the rows are of lower precision."""
    if rows_tX.dtype == scale_X.dtype:
        rows_tX *= scale_X
    else:
        rows_tX.copy_(rows_tX * scale_X)


class IA3Adapter(Adapter):
    """Vectors `NAME.ia3_l` [O] at each of `outputs` and [I] at each of `inputs`, all ones."""

    def __init__(
        self, outputs: Sequence[BaseOp], inputs: Sequence[BaseOp], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = {f"{op.name}.ia3_l": (op.out_features,) for op in outputs}
        shapes |= {f"{op.name}.ia3_l": (op.in_features,) for op in inputs}
        parameters = FlatParameters(shapes, dtype, device)
        for view in parameters.views.values():
            view.detach().fill_(1)
        modules: dict[str, OutputScale | InputScale] = {
            op.name: OutputScale(parameters.views[f"{op.name}.ia3_l"]) for op in outputs
        }
        modules |= {op.name: InputScale(parameters.views[f"{op.name}.ia3_l"]) for op in inputs}
        super().__init__(modules, parameters)
        self.inputs = frozenset(op.name for op in inputs)
