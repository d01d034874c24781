"""BaseOps of the backbone: its frozen linears, each an attach point that adapters can hook.

`install` leaves the module tree as it is (names, weights and hash unchanged) and only routes a linear's forward through
its `LinearOp`. Without a hook in the pass in progress that is the plain linear; with one, the hook gets the BaseOp and
its input rows and answers the output rows. What a hook does with them is the PEFT layer's affair.

Legend: T packed tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from muxtune.models.attention import AttentionContext

Hook = Callable[["LinearOp", Tensor], Tensor]


@dataclass(slots=True)
class Pass:
    """One pass of the backbone: who attends to whom, and which attach points are hooked."""

    attention: AttentionContext
    hooks: Mapping[str, Hook] = field(default_factory=dict)


class PassSlot:
    """Where a backbone's modules find the pass in progress; a block sets it just before it runs its layer."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: Pass | None = None


class Slotted(Protocol):
    """A transformers attention module once `install` has told it where its pass is."""

    layer_idx: int
    muxtune_slot: PassSlot


class LinearOp:
    """A frozen linear y = x W + b, stored either way round: nn.Linear keeps [O, I], GPT-2's Conv1D [I, O]."""

    def __init__(self, name: str, module: nn.Module, slot: PassSlot) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor) and weight.ndim == 2
        self.name = name
        self.transposed = isinstance(module, Conv1D)
        self.weight: Tensor = weight.detach()
        bias = module.bias
        self.bias: Tensor | None = bias.detach() if isinstance(bias, Tensor) else None
        self.out_features, self.in_features = weight.shape if not self.transposed else weight.shape[::-1]
        self._slot = slot

    def forward(self, x_TI: Tensor) -> Tensor:
        weight_OI = self.weight.T if self.transposed else self.weight
        return F.linear(x_TI, weight_OI, self.bias)

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        """dL/dx of `forward`: the only gradient a frozen operator ever needs."""
        return grad_TO @ (self.weight.T if self.transposed else self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """What the module's forward becomes: [..., I] -> [..., O], through the pass's hook where there is one.

        Hooked or not, the kernel sees the same [T, I]: whether a co-runner hooks this linear may not change a bit.
        """
        current = self._slot.current
        hook = current.hooks.get(self.name) if current is not None else None
        x_TI = x.reshape(-1, self.in_features)
        y_TO = hook(self, x_TI) if hook is not None else self.forward(x_TI)
        return y_TO.view(*x.shape[:-1], self.out_features)


def install(layers: Mapping[str, nn.Module], slot: PassSlot) -> dict[str, LinearOp]:
    """Route every linear of `layers` (path -> decoder layer) through a LinearOp; returns them by full module path."""
    ops: dict[str, LinearOp] = {}
    for path, layer in layers.items():
        for name, module in layer.named_modules():
            if hasattr(module, "layer_idx"):
                module.__dict__["muxtune_slot"] = slot
            if isinstance(module, nn.Linear | Conv1D):
                op = LinearOp(f"{path}.{name}", module, slot)
                module.__dict__["forward"] = op
                ops[op.name] = op
    return ops
