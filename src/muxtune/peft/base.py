"""The one representation of PEFT: BaseOp, Adapter, Dispatch, Aggregate.

A *BaseOp* is a frozen operator of the backbone. An *Adapter* is one task's trainable parameters: an `AdapterModule` at
each attach point it hooks. *Dispatch* says which rows of a micro-batch go to which adapter - always a slice, never a
mask or a one-hot sum, so that one task's NaN cannot reach another (0 * NaN is NaN). *Aggregate* is how a module's
output joins the BaseOp's: it is the module's own affair, done in place on its rows.

Every module comes as a hand-written pair (`forward_rows`, `backward_rows`) and as a plain twin through autograd
(`forward_plain`); a test holds them equal.

Legend: t rows of one task, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from muxtune.peft.dropout import RowKeys
from muxtune.peft.parameters import FlatParameters


class BaseOp(Protocol):
    """A frozen linear of the backbone, as the PEFT layer sees it."""

    @property
    def name(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    def forward(self, x_TI: Tensor) -> Tensor: ...
    def input_gradient(self, grad_TO: Tensor) -> Tensor: ...


class AdapterModule(Protocol):
    """What one adapter does at one attach point, on its own rows only."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The leaves it trains, in a fixed order; their `.grad` is where `backward_rows` adds."""
        ...

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """Aggregate into `y_tO` in place; returns what the backward needs. `keys` None switches dropout off."""
        ...

    def backward_rows(
        self, x_tI: Tensor, saved: Tensor, grad_y_tO: Tensor, grad_x_tI: Tensor | None, keys: RowKeys | None
    ) -> None:
        """Add to the parameters' gradients, and to `grad_x_tI` (the BaseOp's own input gradient) in place."""
        ...

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """The twin: new output rows, through autograd."""
        ...


class Adapter(Protocol):
    """One task's trainable parameters: a module at each attach point, their values in one flat buffer."""

    @property
    def modules(self) -> Mapping[str, AdapterModule]: ...
    @property
    def parameters(self) -> FlatParameters: ...
    @property
    def stochastic(self) -> bool:
        """Whether training needs row keys (dropout)."""
        ...


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rows [start, stop) of a micro-batch go to `adapter`; `keys` (one a row) feed its dropout, None in evaluation."""

    start: int
    stop: int
    adapter: Adapter
    keys: RowKeys | None
