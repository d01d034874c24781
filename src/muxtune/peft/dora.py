"""DoRA (Liu et al., 2024): a frozen linear whose rows have trained lengths m and directions moved by a LoRA.

    y = m / n * (W + s B A) x + b        n = ||W + s B A|| by rows, a constant to the gradient (the paper's 4.3)

m starts at ||W||, so training starts from the backbone itself. n depends on the parameters alone: it is made once an
optimizer step, not in each pass, from n^2 = ||W||^2 + 2 s sum(W A^T . B) + s^2 sum(B A A^T . B), which reads W once and
writes no matrix of its size. With dropout the whole adapted product sees the dropped-out x, as in peft 0.21, which
costs one more product with W on the task's own rows.

Legend: t rows of one task, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.peft.base import LinearBase
from muxtune.peft.dropout import RowKeys
from muxtune.peft.lora import LowRankAdapter, LowRankModule, draw_start, low_rank_parameters, pair_of


class DoraModule(LowRankModule):
    """m / n * (W x + s B A x) + b at one attach point."""

    def __init__(
        self, op: LinearBase, lora_a_RI: Tensor, lora_b_OR: Tensor, magnitude_O: Tensor, scale: float, dropout: float
    ) -> None:
        super().__init__(op.name, lora_a_RI, lora_b_OR, scale, dropout)
        self.parameters = (lora_a_RI, lora_b_OR, magnitude_O)
        self._op = op
        self._weight_squares_O = op.weight_OI.to(self._dtype).square().sum(1)
        self.norm_O = torch.empty_like(magnitude_O, requires_grad=False)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make n anew."""
        a_RI, b_OR, _ = self.parameters
        mixed_OR = torch.mm(self._op.weight_OI.to(self._dtype), a_RI.T)
        own_OR = torch.mm(b_OR, torch.mm(a_RI, a_RI.T))
        cross_O = (torch.add(2 * mixed_OR, own_OR, alpha=self._scale) * b_OR).sum(1)
        squares_O = torch.add(self._weight_squares_O, cross_O, alpha=self._scale)
        self.norm_O.copy_(lengths(squares_O))

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        *_, magnitude_O = self.parameters
        inputs_tI = self._inputs(x_tI, keys)
        length_O = magnitude_O / self.norm_O
        moved_tO = length_O * self._delta(inputs_tI)
        return (y_tO + (length_O - 1) * self._base(inputs_tI, y_tO, keys) + moved_tO).to(y_tO.dtype)

    def _base(self, inputs_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """W x on the inputs that the pair sees: what the BaseOp has computed already, but for dropout."""
        if keys is not None and self._dropout > 0:
            return F.linear(inputs_tI, self._op.weight_OI.to(self._dtype))
        y_tO = y_tO.to(self._dtype)
        return y_tO if self._op.bias is None else y_tO - self._op.bias


class DoraAdapter(LowRankAdapter):
    """A DoRA at each of `ops`; the arguments are those of `LoraAdapter`."""

    def __init__(
        self,
        ops: Iterable[LinearBase],
        *,
        r: int,
        scale: float,
        dropout: float,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ops = list(ops)
        parameters = low_rank_parameters(ops, r, dtype, device, magnitudes=True)
        draw_start(ops, parameters, seed)
        self._own = {}
        for op in ops:
            magnitude_O = parameters.views[f"{op.name}.lora_magnitude_vector"]
            module = DoraModule(op, *pair_of(op, parameters), magnitude_O, scale, dropout)
            magnitude_O.detach().copy_(module.norm_O)  # B is zero: these are the norms of W
            self._own[op.name] = module
        super().__init__(self._own, parameters, stochastic=dropout > 0)

    def magnitudes(self) -> dict[str, Tensor]:
        """Attach point -> m [O], detached views of the live values."""
        views = self.parameters.views
        return {name: views[f"{name}.lora_magnitude_vector"].detach() for name in self.modules}

    def refresh(self) -> None:
        """The norms of the adapted rows, from the parameters as they are now."""
        for module in self._own.values():
            module.refresh()


def merged(weight_OI: Tensor, lora_a_RI: Tensor, lora_b_OR: Tensor, magnitude_O: Tensor, scale: float) -> Tensor:
    """m / n * (W + s B A), in the weight's precision."""
    moved_OI = torch.addmm(weight_OI, lora_b_OR.to(weight_OI), lora_a_RI.to(weight_OI), alpha=scale)
    norm_O = lengths(moved_OI.square().sum(1))
    return moved_OI * (magnitude_O.to(norm_O) / norm_O)[:, None]


def lengths(squares_O: Tensor) -> Tensor:
    """Norms of rows from their squares. That of a row of zeros is the smallest number, since 0 / 0 would be none."""
    return squares_O.clamp_min(0).sqrt().clamp_min(torch.finfo(squares_O.dtype).tiny)
