"""A frozen linear for the tests of the PEFT layer, which knows no backbone."""

from __future__ import annotations

import torch
from torch import Tensor

from muxtune.peft.base import HandWritten, Kept
from muxtune.peft.dropout import RowKeys

CPU = torch.device("cpu")


class FrozenLinear:
    """y = x W^T + b; counts how often it runs, and on how many rows."""

    def __init__(self, name: str, in_features: int, out_features: int, *, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self.weight_OI = torch.randn(out_features, in_features, generator=generator).to(dtype)
        self.bias: Tensor | None = torch.randn(out_features, generator=generator).to(dtype)
        self.kind, self.transposed, self.biased = "linear", False, True
        self.roles: frozenset[str] = frozenset()
        self.layer: int | None = None
        self.forward_rows: list[int] = []
        self.backward_rows: list[int] = []

    def forward(self, x_TI: Tensor) -> Tensor:
        self.forward_rows.append(x_TI.shape[0])
        return torch.nn.functional.linear(x_TI, self.weight_OI, self.bias)

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        self.backward_rows.append(grad_TO.shape[0])
        return grad_TO @ self.weight_OI


def backward(
    module: HandWritten, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, grad_x_tI: Tensor | None, keys: RowKeys | None
) -> None:
    """Both steps of a module's backward; `grad_x_tI` None where nothing below trains."""
    own = module.backward_output(x_tI, kept, grad_y_tO, keys)
    if grad_x_tI is not None:
        module.backward_input(x_tI, own, grad_x_tI, keys)
