"""Linears that read the same rows (q, k and v; gate and up) as one product.

`join_weights` lays the weights of such linears one behind the other in one tensor: each module's parameter becomes a
view of its part, so names, bytes and hash of the model stay and memory is what it was; only while one group is copied
do its weights exist twice. A `LinearGroup` is the operator over all of them. Its members stay attach points of their
own: a hook of the group gets the group and its rows and answers the outputs of all members side by side; which columns
are whose, `members` says.

Whether linears are joined is decided when a backbone is built, never for a pass: a product's rows then have the same
bits whatever hooks it.

Legend: T packed tokens, I input features, O output features of all members together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muxtune.models.attach import LinearOp, PassSlot


class LinearGroup:
    """One product for `members`, whose weights `join_weights` has joined."""

    kind: Literal["linear"] = "linear"
    transposed = False

    def __init__(self, members: Sequence[LinearOp], slot: PassSlot) -> None:
        self.members = tuple(members)
        self.name = "+".join(member.name for member in members)
        self.roles = frozenset(role for member in members for role in member.roles)
        self.layer = members[0].layer
        self.in_features = members[0].in_features
        self.out_features = sum(member.out_features for member in members)
        self.weight_OI = _whole([member.weight for member in members])
        biases = [member.bias for member in members if member.bias is not None]
        self.bias: Tensor | None = _whole(biases) if biases else None
        self.biased = self.bias is not None
        self._slot = slot

    def forward(self, x_TI: Tensor) -> Tensor:
        """x W + b, [T, O]."""
        return F.linear(x_TI, self.weight_OI, self.bias)

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        """dL/dx of `forward`."""
        return grad_TO @ self.weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T, O], through the pass's hook where there is one."""
        current = self._slot.current
        hook = current.hooks.get(self.name) if current is not None else None
        return hook(self, x_TI) if hook is not None else self.forward(x_TI)


def joinable(linears: Sequence[nn.Module]) -> bool:
    """Whether they can be one product: plain linears of one input width, dtype and device, all with a bias or none."""
    plain = [module for module in linears if type(module) is nn.Linear]
    kinds = {(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in plain}
    return len(plain) == len(linears) and len(kinds) == 1


def join_weights(linears: Sequence[nn.Linear]) -> None:
    """Move the linears' weights, and their biases, into one tensor each, to the bit."""
    for parameters in ([one.weight for one in linears], [one.bias for one in linears if one.bias is not None]):
        if parameters:
            together = torch.cat([parameter.detach() for parameter in parameters])
            parts = together.split([len(parameter) for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """The tensor that these are the parts of, one behind the other."""
    first = parts[0]
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    at = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() or part.is_meta
        assert same and part.is_contiguous() and part.storage_offset() == at, "weights that were not joined"
        at += part.numel()
    return first.as_strided(shape, first.stride())
