"""PiSSA (Meng et al., 2024) on a backbone that stays as it is.

PiSSA starts B A at the weight's r principal components and takes them out of the weight. The weight is shared here, so
what is added instead is the pair's difference from where it started,

    y += s (B A dropout(x) - B0 A0 x)

which is the same function of the same parameters: peft's frozen residual is W - s B0 A0. Exported, it is a plain LoRA
of rank 2 r: A over A0, B beside -B0 (`plain_pairs`).

A0 and B0 come from a singular value decomposition of each targeted weight, in the adapter's precision: s B0 A0 = U_r
S_r V_r, its square root on either side. That is what starting costs (0.1-0.8 s for a weight of SmolLM2-135M on one CPU
thread); the sum of rank 2 r costs two products more than LoRA. Both are kept with the parameters: singular vectors are
not the same numbers on every machine, and the trained pair means nothing without those it started from.

Legend: t rows of one task, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from muxtune.errors import AdapterError
from muxtune.peft.base import Kept, LinearBase
from muxtune.peft.dropout import RowKeys
from muxtune.peft.lora import LoraModule, LowRankAdapter, low_rank_parameters, pair_of


class PissaModule(LoraModule):
    """y + s (B A dropout(x) - B0 A0 x) at one attach point. B0 lies as B does, transposed."""

    def __init__(
        self,
        attach_point: str,
        lora_a_RI: Tensor,
        lora_b_OR: Tensor,
        start_a_RI: Tensor,
        start_b_OR: Tensor,
        scale: float,
        dropout: float,
    ) -> None:
        super().__init__(attach_point, lora_a_RI, lora_b_OR, scale, dropout)
        self._start_a_IR, self._start_b_RO = start_a_RI.T[None], start_b_OR.T[None]

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """See `HandWritten`: LoRA's, less what the pair began as."""
        down_1tR = self._pair.down(self._inputs(x_tI, keys))
        # Two products of the same shapes and then their difference: at the start that is zero to the bit.
        delta_tO = torch.bmm(down_1tR, self._pair.b_KRO)[0]
        delta_tO -= self._start(x_tI)
        y_tO.add_(delta_tO.mul_(self._scale))
        return (down_1tR,)

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        grad_y_tO = grad_y_tO.to(self._dtype)
        return (*super().backward_output(x_tI, kept, grad_y_tO, keys), grad_y_tO)

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        *own, grad_y_tO = kept
        super().backward_input(x_tI, tuple(own), grad_x_tI, keys)
        grad_down_1tR = torch.bmm(grad_y_tO[None], self._start_b_RO.mT)
        grad_x_tI -= torch.bmm(grad_down_1tR, self._start_a_IR.mT)[0].mul_(self._scale)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        delta_tO = self._delta(self._inputs(x_tI, keys)) - self._scale * self._start(x_tI)
        return (y_tO + delta_tO).to(y_tO.dtype)

    def _start(self, x_tI: Tensor) -> Tensor:
        """B0 A0 x."""
        return torch.bmm(torch.bmm(x_tI.to(self._dtype)[None], self._start_a_IR), self._start_b_RO)[0]


Start = Callable[[LinearBase, int, float, torch.dtype], tuple[Tensor, Tensor]]


class PissaAdapter(LowRankAdapter):
    """A PiSSA at each of `ops`; the arguments are those of `LoraAdapter`, but that nothing is drawn: the pairs begin as
    `start` says.

    Raises AdapterError where a weight has fewer than r components.
    """

    def __init__(
        self,
        ops: Iterable[LinearBase],
        *,
        r: int,
        scale: float,
        dropout: float,
        dtype: torch.dtype,
        device: torch.device,
        start: Start | None = None,
    ) -> None:
        ops = list(ops)
        parameters = low_rank_parameters(ops, r, dtype, device)
        fixed: dict[str, Tensor] = {}
        modules: dict[str, PissaModule] = {}
        for op in ops:
            pair, began = pair_of(op, parameters), (start or principal)(op, r, scale, dtype)
            for leaf, value in zip(pair, began, strict=True):
                leaf.detach().copy_(value)
            fixed[f"{op.name}.start_A"], fixed[f"{op.name}.start_B"] = began
            modules[op.name] = PissaModule(op.name, *pair, *began, scale, dropout)
        super().__init__(modules, parameters, fixed=fixed, stochastic=dropout > 0)

    def plain_pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Attach point -> (A [2 R, I], B [O, 2 R]) of the plain LoRA that this is, at the same scale."""
        return {
            name: (
                torch.cat([a_RI, self.fixed[f"{name}.start_A"]]),
                torch.cat([b_OR, -self.fixed[f"{name}.start_B"]], dim=1),
            )
            for name, (a_RI, b_OR) in self.pairs().items()
        }


def principal(op: LinearBase, r: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A0 [R, I] and B0 [O, R], the latter with its columns one after another. Zeros where W has no memory.

    Raises AdapterError where the weight has fewer than r components.
    """
    most = min(op.in_features, op.out_features)
    if r > most:
        raise AdapterError(
            f"PiSSA wants {r} principal components, the weight has {most}", where=op.name, hint=f"peft.r: {most}"
        )
    if op.weight_OI.is_meta:
        return blank(op, r, scale, dtype)
    return decomposed(op.weight_OI.to(dtype), r, scale)


def decomposed(weight_OI: Tensor, r: int, scale: float) -> tuple[Tensor, Tensor]:
    """A0 and B0 of a weight."""
    u_OM, s_M, v_MI = torch.linalg.svd(weight_OI, full_matrices=False)
    root_R1 = (s_M[:r, None] / scale).sqrt()
    # laid out as the trained pair is, so that the products of both are the same kernels
    return (root_R1 * v_MI[:r]).contiguous(), (root_R1 * u_OM.T[:r]).contiguous().T


def blank(op: LinearBase, r: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A pair of zeros, to be filled in."""
    a_RI, b_RO = torch.zeros(r, op.in_features, dtype=dtype), torch.zeros(r, op.out_features, dtype=dtype)
    return a_RI, b_RO.T
