"""What every PEFT spec tells the planner, from the attach points of a base model alone: no model, no torch.

The planner can so weigh a job on a laptop. A `Place` is one attach point as integers and names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple, Self

from muxtune.spec.border import Spec

ADAPTER_BYTES_PER_PARAMETER = 4 * 4  # fp32: the parameter, its gradient and AdamW's two moments


Kind = Literal["linear", "norm", "mlp", "embedding", "head"]


class Place(NamedTuple):
    """An attach point: `kind` and `roles` as the backbone names them, its features in and out (of the token embedding:
    its entries and its width), a bias or none."""

    name: str
    kind: Kind
    roles: frozenset[str]
    layer: int | None
    inputs: int
    outputs: int
    biased: bool = False


class PeftBase(Spec, ABC):
    """A PEFT type's settings. `type` is the discriminator."""

    default_learning_rate: ClassVar[float]

    type: str

    @abstractmethod
    def parameters(self, places: Iterable[Place]) -> int:
        """Trainable parameters, given every attach point of the base model; the spec picks its own."""

    @abstractmethod
    def flops_per_token(self, places: Iterable[Place]) -> int:
        """Floating-point operations of one trained token, forward and backward, beyond the backbone's own."""

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        """Names among its targets that are no attach point of the base model."""
        return ()

    def resolved(self, places: Iterable[Place]) -> Self:
        """The same adapter with what its settings leave to the base model's family said outright."""
        return self

    @property
    def label(self) -> str:
        """The name it goes by: of the type, or the short name of its variant."""
        return self.type

    def state_bytes(self, places: Iterable[Place]) -> int:
        """Memory that the task holds while it trains: parameters, gradients and moments, activations not counted."""
        return ADAPTER_BYTES_PER_PARAMETER * self.parameters(places)

    @property
    def drops_out(self) -> bool:
        """Whether what its modules are given drops out while it trains."""
        return any(getattr(self, key) for key in type(self).model_fields if "dropout" in key)

    @property
    def virtual_rows(self) -> int:
        """Rows that the adapter adds to each sequence (prompt tuning)."""
        return 0

    @property
    def prefix_length(self) -> int:
        """Learned key/value positions before each sequence (prefix tuning)."""
        return 0

    @property
    def lead(self) -> int:
        """Positions before a sequence's own first token."""
        return self.prefix_length + self.virtual_rows
