"""LoRA (Hu et al., 2021): y += (alpha / r) * B A dropout(x), beside a frozen linear.

A [R, I] starts uniform in +-1/sqrt(I) (what peft's Kaiming-uniform with a = sqrt 5 comes to) and B [O, R] at zero, so
training starts from the backbone itself. Each matrix is drawn from a generator of its own, seeded by the job's seed
and the attach point's name: the same seed gives the same adapter whatever else runs. Arithmetic is in the adapter's
own precision (fp32 on a bf16 backbone), as in peft.

Legend: t rows of one task, I input features, O output features, R rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from muxtune.peft.base import BaseOp
from muxtune.peft.dropout import RowKeys, keep_mask
from muxtune.peft.parameters import FlatParameters


class LoraModule:
    """One pair at one attach point."""

    def __init__(self, attach_point: str, lora_a_RI: Tensor, lora_b_OR: Tensor, scale: float, dropout: float) -> None:
        self._attach_point = attach_point
        self._a_RI = lora_a_RI
        self._b_OR = lora_b_OR
        self._scale = scale
        self._dropout = dropout

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self._a_RI, self._b_OR)

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """See `AdapterModule`; what the backward needs is A dropout(x), [t, R]."""
        down_tR = self._inputs(x_tI, keys) @ self._a_RI.T
        if y_tO.dtype == down_tR.dtype:
            y_tO.addmm_(down_tR, self._b_OR.T, alpha=self._scale)
        else:
            y_tO.copy_(torch.addmm(y_tO.to(down_tR.dtype), down_tR, self._b_OR.T, alpha=self._scale))
        return down_tR

    def backward_rows(
        self, x_tI: Tensor, saved: Tensor, grad_y_tO: Tensor, grad_x_tI: Tensor | None, keys: RowKeys | None
    ) -> None:
        """See `AdapterModule`: three products of rank R, the dropped-out inputs made again."""
        grad_a, grad_b = self._a_RI.grad, self._b_OR.grad
        assert grad_a is not None and grad_b is not None
        grad_y_tO = grad_y_tO.to(saved.dtype)
        grad_b.addmm_(grad_y_tO.T, saved, alpha=self._scale)
        grad_down_tR = (grad_y_tO @ self._b_OR).mul_(self._scale)
        grad_a.addmm_(grad_down_tR.T, self._inputs(x_tI, keys))
        if grad_x_tI is None:
            return
        if self._masked(keys):
            grad_x_tI += self._drop(grad_down_tR @ self._a_RI, keys).to(grad_x_tI.dtype)
        elif grad_x_tI.dtype == grad_down_tR.dtype:
            grad_x_tI.addmm_(grad_down_tR, self._a_RI)
        else:
            grad_x_tI += (grad_down_tR @ self._a_RI).to(grad_x_tI.dtype)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        delta_tO = self._inputs(x_tI, keys) @ self._a_RI.T @ self._b_OR.T
        return (y_tO + self._scale * delta_tO).to(y_tO.dtype)

    def _inputs(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        x_tI = x_tI.to(self._a_RI.dtype)
        return self._drop(x_tI, keys) if self._masked(keys) else x_tI

    def _masked(self, keys: RowKeys | None) -> bool:
        return self._dropout > 0 and keys is not None

    def _drop(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        assert keys is not None
        keep_tI = keep_mask(keys, self._attach_point, x_tI.shape[1], self._dropout)
        return x_tI * keep_tI / (1 - self._dropout)


class LoraAdapter:
    """A LoRA pair at each of `ops`.

    Args:
        ops: the attach points to hook, in the backbone's order.
        scale: alpha / r.
        seed: the job's; decides the start values with the attach points' names alone.
        dtype: of the parameters, float32 or float64.
    """

    def __init__(
        self,
        ops: Iterable[BaseOp],
        *,
        r: int,
        scale: float,
        dropout: float,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ops = list(ops)
        shapes: dict[str, tuple[int, ...]] = {}
        for op in ops:
            shapes[f"{op.name}.lora_A"] = (r, op.in_features)
            shapes[f"{op.name}.lora_B"] = (op.out_features, r)
        self.parameters = FlatParameters(shapes, dtype, device)
        self.stochastic = dropout > 0
        self.modules: dict[str, LoraModule] = {}
        for op in ops:
            a_RI = self.parameters.views[f"{op.name}.lora_A"]
            b_OR = self.parameters.views[f"{op.name}.lora_B"]
            with torch.no_grad():
                a_RI.copy_(_uniform(op.name, seed, (r, op.in_features)))
            self.modules[op.name] = LoraModule(op.name, a_RI, b_OR, scale, dropout)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Attach point -> (A [R, I], B [O, R]), detached views of the live values."""
        views = self.parameters.views
        return {name: (views[f"{name}.lora_A"].detach(), views[f"{name}.lora_B"].detach()) for name in self.modules}

    def load_pairs(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take the values of `pairs`, which must cover exactly this adapter's attach points."""
        tensors = {f"{name}.lora_A": pair[0] for name, pair in pairs.items()}
        self.parameters.load(tensors | {f"{name}.lora_B": pair[1] for name, pair in pairs.items()})


def _uniform(attach_point: str, seed: int, shape: tuple[int, int]) -> Tensor:
    """[R, I] uniform in +-1/sqrt(I), fp32 on the CPU whatever the device, so that devices start alike."""
    digest = hashlib.blake2b(f"{seed}/{attach_point}/lora_A".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
