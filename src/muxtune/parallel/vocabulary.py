"""The two ends of a model whose vocabulary is split over ranks: embedding, head and loss.

*Embedding*: a rank looks up the ids that it has, the others' rows are zero, and the sum is the embedding.
*Head*: a rank computes the logits of its entries. For the loss the ranks tell each other, of each row, their largest
logit, then sums (of exponentials, and the target's logit, which one rank has): two exchanges of a few numbers a row,
never the logits. The gradient of the rows is a sum over the vocabulary, so one over the ranks: a third exchange, as
wide as the rows. Adapters on the head need nothing of their own: they see the logits of the rank's entries.

Whole logits are put together only where somebody asks for them: for decoding, and in the plain twin.

Legend: N rows, n rows of a slice, D model width, V the rank's entries, W all entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muxtune.models.head_rows import HeadRows, Piece
from muxtune.models.loss import Head, TokenLosses
from muxtune.parallel.mesh import ALONE, TensorAxis, entered, summed


class VocabularyEmbedding(nn.Module):
    """Looks up ids among `entries`; zero rows for the others, and the sum over the ranks."""

    def __init__(
        self,
        weight_VE: nn.Parameter,
        entries: range,
        axis: TensorAxis,
        padding_idx: int | None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if scale is not None:  # Gemma's, of looked-up rows
            self.embed_scale = torch.tensor(scale, dtype=weight_VE.dtype)  # as a loaded model has it
        self.weight = weight_VE
        self.padding_idx = padding_idx
        self._entries = entries
        self._axis = axis

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        own = ids - self._entries.start
        absent = (own < 0) | (own >= len(self._entries))
        rows = F.embedding(own.masked_fill(absent, 0), self.weight).masked_fill(absent[..., None], 0)
        rows = self._axis.sum_(rows)
        return rows * self.embed_scale.to(rows.dtype) if hasattr(self, "embed_scale") else rows


@dataclass(frozen=True, slots=True)
class VocabularyHead(Head):
    """The head's `entries` of `full`; weight and bias are those of the entries."""

    entries: range = range(0)
    full: int = 0
    axis: TensorAxis = ALONE

    def slice_losses(
        self, hidden_nD: Tensor, target_n: Tensor, weight_n: Tensor | None, pieces: Sequence[Piece]
    ) -> TokenLosses:
        """See `Head.slice_losses`: the same on all ranks."""
        logits_nV, saved = self.adapted(hidden_nD, pieces)
        own_n1, absent_n1 = self._own(target_n)
        score_n1 = logits_nV.gather(1, own_n1).masked_fill(absent_n1, 0)
        highest_n1, guess_n1 = logits_nV.max(dim=1, keepdim=True)
        top_n1 = self.axis.max_(highest_n1.clone())
        slope_nV = self.slope(logits_nV) if weight_n is not None else None
        odds_nV = logits_nV.sub_(top_n1).exp_()
        # of equal logits the first counts, so a rank before the target's that has the top too takes it away
        has_top_n1 = highest_n1 == top_n1
        hit_n1 = has_top_n1 & (guess_n1 == own_n1) & ~absent_n1
        earlier_n1 = has_top_n1 & (target_n[:, None] >= self.entries.stop)
        told_n4 = torch.cat(
            [odds_nV.sum(dim=1, keepdim=True), score_n1, hit_n1.to(score_n1), earlier_n1.to(score_n1)], 1
        )
        total_n1, target_score_n1, hits_n1, earliers_n1 = self.axis.sum_(told_n4).split(1, dim=1)
        logprob_n = (target_score_n1 - top_n1 - total_n1.log()).squeeze(1)
        correct_n = ((hits_n1 > 0) & (earliers_n1 == 0)).squeeze(1)
        if weight_n is None:
            return TokenLosses(logprob_n, correct_n, None)
        weight_n1 = weight_n[:, None].to(odds_nV.dtype)
        delta_nV = odds_nV.mul_(weight_n1 / total_n1)
        delta_nV.scatter_add_(1, own_n1, -weight_n1.masked_fill(absent_n1, 0))
        grad_nD = self.pulled(delta_nV, slope_nV, hidden_nD, pieces, saved)
        return TokenLosses(logprob_n, correct_n, self.axis.sum_(grad_nD))

    def logits(self, hidden_ND: Tensor, hooked: Sequence[HeadRows] = ()) -> Tensor:
        """[N, W], of all entries."""
        return self._whole(Head.logits(self, hidden_ND, hooked))

    def logits_plain(self, hidden_ND: Tensor, hooked: Sequence[HeadRows] = ()) -> Tensor:
        """The twin of `logits`, through autograd."""
        return self._whole(Head.logits_plain(self, entered(hidden_ND, self.axis), hooked))

    def _own(self, target_n: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 1] each: a target's index among the rank's entries, and whether it is not among them (index 0 then)."""
        own_n1 = target_n[:, None] - self.entries.start
        absent_n1 = (own_n1 < 0) | (own_n1 >= len(self.entries))
        return own_n1.masked_fill(absent_n1, 0), absent_n1

    def _whole(self, logits_NV: Tensor) -> Tensor:
        return summed(F.pad(logits_NV, (self.entries.start, self.full - self.entries.stop)), self.axis)
