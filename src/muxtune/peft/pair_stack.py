"""The products of K LoRA pairs at once, on the rows of K tasks that have as many each; K is one for a module alone.

    forward             d = x A^T,  y += s d B^T
    backward            dB += s g^T d,  e = g B,  dA += s e^T x;  then dx += s e A

Each is one batched product (`torch.bmm`, `baddbmm_`) whose k-th item sees task k's rows and matrices alone: nothing is
masked, padded or concatenated. The matrices are views of the tasks' own buffers, which lie at equal distances in one
slab (`muxtune.peft.slab`), and gradients are added where the optimizers read them: nothing is copied.

**Bits.** An item's result does not depend on how many there are, from rank 2 on (`GROUPED_RANK`; of rank 1 some
products are of a matrix and a vector, and their kernel's does). A batched product of one item is not `torch.mm` to the
bit, so a module alone goes through here, too: then grouped and one by one are the same numbers (docs/adr/0007).

Legend: K tasks, n rows of each, t = K n rows, I input features, O output features, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUPED_RANK = 2  # the smallest


@dataclass(frozen=True, slots=True)
class PairShape:
    """A pair at one attach point."""

    rank: int
    inputs: int
    outputs: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PairStack:
    """Views of K pairs and of their gradients; B lies as its buffer has it, [R, O]."""

    scale: float
    a_KRI: Tensor
    b_KRO: Tensor
    a_KIR: Tensor
    b_KOR: Tensor
    grad_a_KRI: Tensor
    grad_b_KRO: Tensor

    @classmethod
    def of(cls, lora_a_RI: Tensor, lora_b_OR: Tensor, scale: float, count: int = 1, distance: int = 0) -> PairStack:
        """The pair whose leaves are given, and the `count` - 1 ones behind it, each `distance` elements further on."""
        grad_a_RI, grad_b_OR = lora_a_RI.grad, lora_b_OR.grad
        assert grad_a_RI is not None and grad_b_OR is not None
        a_KRI = _repeated(lora_a_RI.detach(), count, distance)
        b_KRO = _repeated(lora_b_OR.detach().T, count, distance)
        return cls(
            scale,
            a_KRI,
            b_KRO,
            a_KRI.mT,
            b_KRO.mT,
            _repeated(grad_a_RI, count, distance),
            _repeated(grad_b_OR.T, count, distance),
        )

    def down(self, inputs_tI: Tensor) -> Tensor:
        """A x [K, n, R]. The rows are in the pairs' precision."""
        return torch.bmm(self._by_task(inputs_tI), self.a_KIR)

    def add_up(self, y_tO: Tensor, down_KnR: Tensor) -> None:
        """y += s B d, in place; rounded once where y is of lower precision."""
        if y_tO.dtype == self.b_KRO.dtype:
            self._by_task(y_tO).baddbmm_(down_KnR, self.b_KRO, alpha=self.scale)
        else:
            wide_tO = y_tO.to(self.b_KRO.dtype)
            self._by_task(wide_tO).baddbmm_(down_KnR, self.b_KRO, alpha=self.scale)
            y_tO.copy_(wide_tO)

    def pull(self, inputs_tI: Tensor, down_KnR: Tensor, grad_y_tO: Tensor) -> Tensor:
        """Add to the gradients of both matrices; g B [K, n, R], but for the scale, which `add_back` brings in."""
        grad_KnO = self._by_task(grad_y_tO)
        self.grad_b_KRO.baddbmm_(down_KnR.mT, grad_KnO, alpha=self.scale)
        grad_down_KnR = torch.bmm(grad_KnO, self.b_KOR)
        self.grad_a_KRI.baddbmm_(grad_down_KnR.mT, self._by_task(inputs_tI), alpha=self.scale)
        return grad_down_KnR

    def add_back(self, grad_x_tI: Tensor, grad_down_KnR: Tensor) -> None:
        """dx += s e A, in place. The rows are in the pairs' precision."""
        self._by_task(grad_x_tI).baddbmm_(grad_down_KnR, self.a_KRI, alpha=self.scale)

    def back(self, grad_down_KnR: Tensor) -> Tensor:
        """s e A [t, I]."""
        return torch.bmm(grad_down_KnR, self.a_KRI).flatten(0, 1).mul_(self.scale)

    def _by_task(self, rows_tX: Tensor) -> Tensor:
        count = self.a_KRI.shape[0]
        return rows_tX[None] if count == 1 else rows_tX.unflatten(0, (count, -1))


def _repeated(matrix: Tensor, count: int, distance: int) -> Tensor:
    """A view of `count` matrices like this one, `distance` elements from one to the next."""
    if count == 1:
        return matrix[None]
    return matrix.as_strided((count, *matrix.shape), (distance, *matrix.stride()))
