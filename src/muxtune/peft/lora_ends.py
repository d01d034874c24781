"""LoRA at the two ends of a backbone: the token embedding, and the head on gathered rows.

Embedding: a row of token v gets s c (B A[:, v]), with c the embedding's own scale (Gemma's), as in peft: no dropout,
A [R, V] starts at zero and B [E, R] normal. A lies by columns, so a lookup copies whole rows; its gradient is added row
by row in the order of the tokens, each where its token stands - the same sum however a batch is cut, and whoever else
is in it. The entry of `padding_idx` learns nothing, as PyTorch has it.

Head: an ordinary pair (`muxtune.peft.lora.LoraModule`) that gets logits before their soft cap; `HeadShare` hands it the
rows of one sweep over the trained positions (`muxtune.models.loss`, which knows nothing of adapters).

Cost: at the embedding three products of [t, R] with [R, E]; nothing of the vocabulary's size but the optimizer step.

Legend: t rows of one task, n of them in one piece (filling included), V entries, E embedding width, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.peft.base import AdapterModule, HandWritten, Kept, PlainModule
from muxtune.peft.dropout import RowKeys


class LoraEmbeddingModule(PlainModule):
    """y + s B A[:, id], by hand and plainly. `scale`: s times the embedding's own."""

    by_hand = True

    def __init__(self, lora_a_RV: Tensor, lora_b_ER: Tensor, scale: float, padding_id: int | None) -> None:
        super().__init__(lora_a_RV, lora_b_ER)
        self._scale, self._padding_id, self._dtype = scale, padding_id, lora_a_RV.dtype
        self.bind()

    def bind(self) -> None:
        """Make anew the views that the products take."""
        a_RV, b_ER = self.parameters
        assert a_RV.grad is not None and b_ER.grad is not None
        self._a_VR, self._b_RE = a_RV.detach().T, b_ER.detach().T
        self._grad_a_VR, self._grad_b_RE = a_RV.grad.T, b_ER.grad.T

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """Add to the looked-up rows; keeps A[:, id]. `x_tI`: ids [t]."""
        found_tR = self._a_VR.index_select(0, x_tI)
        if y_tO.dtype == self._dtype:
            y_tO.addmm_(found_tR, self._b_RE, alpha=self._scale)
        else:
            y_tO.copy_(torch.addmm(y_tO.to(self._dtype), found_tR, self._b_RE, alpha=self._scale))
        return (found_tR,)

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """The gradients of B and of A's columns that were looked up."""
        (found_tR,) = kept
        grad_y_tO = grad_y_tO.to(self._dtype)
        self._grad_b_RE.addmm_(found_tR.T, grad_y_tO, alpha=self._scale)
        grad_found_tR = torch.mm(grad_y_tO, self._b_RE.T).mul_(self._scale)
        if self._padding_id is not None:
            grad_found_tR.masked_fill_((x_tI == self._padding_id)[:, None], 0)
        _add_rows(self._grad_a_VR, x_tI, grad_found_tR)
        return ()

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        raise AssertionError("ids have no gradient")

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        a_RV, b_ER = self.parameters
        found_tR = F.embedding(x_tI, a_RV.T, padding_idx=self._padding_id)
        return (y_tO + self._scale * (found_tR @ b_ER.T)).to(y_tO.dtype)


def _add_rows(sum_VR: Tensor, index_t: Tensor, rows_tR: Tensor) -> None:
    """sum[index] += rows, in the order of the rows. On the CPU `index_add_` goes row by row, and `index_put_` does not
    say in which order; on CUDA it is the other way round."""
    if sum_VR.device.type == "cpu":
        sum_VR.index_add_(0, index_t, rows_tR)
    else:
        sum_VR.index_put_((index_t,), rows_tR, accumulate=True)


class HeadModule(AdapterModule, HandWritten, Protocol):
    """A module that comes by hand."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A module at the head with the keys of all its gathered rows; see `muxtune.models.head_rows.HeadHook`."""

    module: HeadModule
    keys: RowKeys | None

    def forward(self, rows: slice, hidden_nD: Tensor, raw_nV: Tensor) -> Kept:
        return self.module.forward_rows(hidden_nD, raw_nV, self._keys(rows, hidden_nD.shape[0]))

    def backward(self, rows: slice, hidden_nD: Tensor, kept: Kept, delta_nV: Tensor, grad_nD: Tensor) -> None:
        keys = self._keys(rows, hidden_nD.shape[0])
        pulled = self.module.backward_output(hidden_nD, kept, delta_nV, keys)
        self.module.backward_input(hidden_nD, pulled, grad_nD, keys)

    def forward_plain(self, hidden_nD: Tensor, raw_nV: Tensor) -> Tensor:
        return self.module.forward_plain(hidden_nD, raw_nV, self.keys)

    def _keys(self, rows: slice, count: int) -> RowKeys | None:
        """Of a piece; rows of filling are zero whatever their key."""
        if self.keys is None:
            return None
        spare = (0, 0, 0, count - (rows.stop - rows.start))
        return RowKeys(F.pad(self.keys.low_t1[rows], spare), F.pad(self.keys.high_t1[rows], spare))
