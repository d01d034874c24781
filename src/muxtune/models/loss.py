"""The LM head and the loss on trained positions only, in slices, with the gradient made in the same sweep.

The rows that predict a trained token are gathered before the head runs: prompts, padding and tails never meet the
vocabulary. A slice's logits exist once and are turned into the gradient of its rows in place, so the memory is one
[slice, V] buffer whatever the batch. Since the weight of every token (1 / the task's denominator) is known beforehand,
nothing has to be kept for a later backward.

Adapters on the head join in the same sweep (`muxtune.models.head_rows`): each adds to the logits of its own rows before
the soft cap, and takes its gradient from theirs afterwards.

`token_losses_plain` is the twin, through autograd.

Legend: N trained positions, n rows of a slice (padding included), D what the head takes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.models.head_rows import ROW_MULTIPLE, SLICE_ROWS, HeadRows, Piece, cut
from muxtune.spec.peft import Place

__all__ = ["ROW_MULTIPLE", "SLICE_ROWS", "Head", "TokenLosses", "token_losses", "token_losses_plain"]


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection of a backbone, a BaseOp like its linears; `softcap` as in Gemma-2 (logits -> cap *
    tanh(logits / cap))."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    name: str = "lm_head"

    @property
    def kind(self) -> Literal["head"]:
        return "head"

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"head"})

    @property
    def layer(self) -> int | None:
        return None

    @property
    def in_features(self) -> int:
        return int(self.weight_VD.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight_VD.shape[0])

    @property
    def biased(self) -> bool:
        return self.bias_V is not None

    @property
    def table(self) -> Tensor:
        """The weight, one row an entry."""
        return self.weight_VD

    @property
    def place(self) -> Place:
        return Place(self.name, self.kind, self.roles, self.layer, self.in_features, self.out_features, self.biased)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] before the soft cap, in at least fp32."""
        raw_NV = F.linear(hidden_ND, self.weight_VD, self.bias_V)
        return raw_NV.to(torch.promote_types(raw_NV.dtype, torch.float32))

    def cap(self, raw_NV: Tensor) -> Tensor:
        return raw_NV if self.softcap is None else torch.tanh(raw_NV / self.softcap) * self.softcap

    def logits(self, hidden_ND: Tensor, hooked: Sequence[HeadRows] = ()) -> Tensor:
        """[N, V], in at least fp32, all at once. Without a gradient."""
        raw_NV = self.forward(hidden_ND)
        for share in hooked:
            rows = slice(share.start, share.stop)
            spare = (0, 0, 0, -(share.stop - share.start) % ROW_MULTIPLE)
            own_nV = F.pad(raw_NV[rows], spare)  # rows of its own, aligned whatever the vocabulary's size
            share.hook.forward(slice(0, share.stop - share.start), F.pad(hidden_ND[rows], spare), own_nV)
            raw_NV[rows] = own_nV[: share.stop - share.start]
        return self.cap(raw_NV)

    def logits_plain(self, hidden_ND: Tensor, hooked: Sequence[HeadRows] = ()) -> Tensor:
        """The twin of `logits`, through autograd."""
        raw_NV = self.forward(hidden_ND)
        done, parts = 0, []
        for share in hooked:
            rows = slice(share.start, share.stop)
            parts += [raw_NV[done : share.start], share.hook.forward_plain(hidden_ND[rows], raw_NV[rows])]
            done = share.stop
        return self.cap(torch.cat([*parts, raw_NV[done:]]))

    def slice_losses(
        self, hidden_nD: Tensor, target_n: Tensor, weight_n: Tensor | None, pieces: Sequence[Piece]
    ) -> TokenLosses:
        """One slice; its logits become the gradient of its rows in place."""
        logits_nV, saved = self.adapted(hidden_nD, pieces)
        top_n1, guess_n1 = logits_nV.max(dim=1, keepdim=True)
        target_n1 = target_n[:, None]
        score_n1 = logits_nV.gather(1, target_n1) - top_n1
        slope_nV = self.slope(logits_nV) if weight_n is not None else None
        odds_nV = logits_nV.sub_(top_n1).exp_()
        total_n1 = odds_nV.sum(dim=1, keepdim=True)
        logprob_n = (score_n1 - total_n1.log()).squeeze(1)
        correct_n = (guess_n1 == target_n1).squeeze(1)
        if weight_n is None:
            return TokenLosses(logprob_n, correct_n, None)
        weight_n1 = weight_n[:, None].to(odds_nV.dtype)
        delta_nV = odds_nV.mul_(weight_n1 / total_n1).scatter_add_(1, target_n1, -weight_n1)
        return TokenLosses(logprob_n, correct_n, self.pulled(delta_nV, slope_nV, hidden_nD, pieces, saved))

    def adapted(self, hidden_nD: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """The logits of a slice with what hooks them, and what each piece needs for its way back."""
        logits_nV = self.forward(hidden_nD)
        saved = [piece.hook.forward(piece.rows, hidden_nD[piece.at], logits_nV[piece.at]) for piece in pieces]
        return self.cap(logits_nV), saved

    def slope(self, logits_nV: Tensor) -> Tensor | None:
        """Of the soft cap, where there is one, at logits that have been through it."""
        return 1 - (logits_nV / self.softcap) ** 2 if self.softcap is not None else None

    def pulled(
        self,
        delta_nV: Tensor,
        slope_nV: Tensor | None,
        hidden_nD: Tensor,
        pieces: Sequence[Piece],
        saved: Sequence[tuple[Tensor, ...]],
    ) -> Tensor:
        """The gradient of a slice's rows, from that of its capped logits, which is written over; pieces add theirs."""
        if slope_nV is not None:
            delta_nV *= slope_nV
        grad_nD = delta_nV.to(hidden_nD.dtype) @ self.weight_VD
        for piece, kept in zip(pieces, saved, strict=True):
            at = piece.at
            piece.hook.backward(piece.rows, hidden_nD[at], kept, delta_nV[at], grad_nD[at])
        return grad_nD


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """For each trained position: log-probability of its target, whether it was the argmax, and d(sum w * -logp)/dh."""

    logprob_N: Tensor
    correct_N: Tensor
    grad_ND: Tensor | None


def token_losses(
    head: Head, hidden_ND: Tensor, target_N: Tensor, weight_N: Tensor | None, hooked: Sequence[HeadRows] = ()
) -> TokenLosses:
    """Losses of N trained positions, and their gradient where `weight_N` (dL/d(-logp) of each) is given.

    Each slice is filled with zero rows to a multiple of 16, so that a row's result does not depend on how many
    others there are (design contract 1). `hooked`: rows with an adapter on the head, ascending, none twice.
    """
    total = hidden_ND.shape[0]
    spare_ND, spare_N = F.pad(hidden_ND, (0, 0, 0, 1)), F.pad(target_N, (0, 1))  # row `total` is the filling
    spare_weight_N = F.pad(weight_N, (0, 1)) if weight_N is not None else None
    logprob_N = spare_ND.new_zeros(total + 1, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    correct_N = spare_N.new_zeros(total + 1, dtype=torch.bool)
    grad_ND = torch.zeros_like(spare_ND) if weight_N is not None else None
    for part in cut(total, hooked):
        index_n = torch.from_numpy(part.index_n).to(hidden_ND.device)
        weight_n = spare_weight_N[index_n] if spare_weight_N is not None else None
        found = head.slice_losses(spare_ND[index_n], spare_N[index_n], weight_n, part.pieces)
        logprob_N[index_n], correct_N[index_n] = found.logprob_N, found.correct_N
        if grad_ND is not None and found.grad_ND is not None:
            grad_ND[index_n] = found.grad_ND
    return TokenLosses(logprob_N[:total], correct_N[:total], grad_ND[:total] if grad_ND is not None else None)


def token_losses_plain(
    head: Head, hidden_ND: Tensor, target_N: Tensor, weight_N: Tensor | None, hooked: Sequence[HeadRows] = ()
) -> TokenLosses:
    """The twin of `token_losses`: whole logits, PyTorch's cross-entropy, autograd."""
    hidden_ND = hidden_ND.detach().requires_grad_(weight_N is not None)
    with torch.set_grad_enabled(weight_N is not None):
        logits_NV = head.logits_plain(hidden_ND, hooked)
        loss_N = F.cross_entropy(logits_NV, target_N, reduction="none")
    if weight_N is not None:
        torch.autograd.backward([loss_N], [weight_N.to(loss_N.dtype)])
    return TokenLosses(-loss_N.detach(), logits_NV.detach().argmax(dim=1) == target_N, hidden_ND.grad)
