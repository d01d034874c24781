"""(IA)^3 (Liu et al., 2022): a learned vector l on an activation, starting at one.

    y = l * (W x + b)        keys, values and other targeted linears
    y = W (l * x) + b        feed-forward ones: the BaseOp sees other rows

Products are in the adapter's precision and rounded once, as in peft.

Legend: t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muxtune.peft.base import Adapter, BaseOp, PlainModule
from muxtune.peft.dropout import RowKeys
from muxtune.peft.parameters import FlatParameters


class OutputScale(PlainModule):
    """l on the BaseOp's output."""

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        (scale_O,) = self.parameters
        return (y_tO * scale_O).to(y_tO.dtype)


class InputScale(PlainModule):
    """l on the BaseOp's input; nothing is left to do with its output, which the empty pair says."""

    additive = True
    changes_input = True

    def input_rows(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        (scale_I,) = self.parameters
        return (x_tI * scale_I).to(x_tI.dtype)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        return y_tO

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        return y_tO.new_empty(0)

    def backward_rows(
        self, x_tI: Tensor, saved: Tensor, grad_y_tO: Tensor, grad_x_tI: Tensor | None, keys: RowKeys | None
    ) -> None:
        """The vector's gradient came with that of the rows."""


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
