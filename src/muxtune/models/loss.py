"""The LM head and the loss on trained positions only, in slices, with the gradient made in the same sweep.

The rows that predict a trained token are gathered before the head runs: prompts, padding and tails never meet the
vocabulary. A slice's logits exist once and are turned into the gradient of its rows in place, so the memory is one
[slice, V] buffer whatever the batch. Since the weight of every token (1 / the task's denominator) is known beforehand,
nothing has to be kept for a later backward.

`token_losses_plain` is the twin, through autograd.

Legend: N trained positions, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SLICE_ROWS = 256
ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection of a backbone; `softcap` as in Gemma-2 (logits -> cap * tanh(logits / cap))."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V], in at least fp32."""
        logits = F.linear(hidden_ND, self.weight_VD, self.bias_V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """For each trained position: log-probability of its target, whether it was the argmax, and d(sum w * -logp)/dh."""

    logprob_N: Tensor
    correct_N: Tensor
    grad_ND: Tensor | None


def token_losses(head: Head, hidden_ND: Tensor, target_N: Tensor, weight_N: Tensor | None) -> TokenLosses:
    """Losses of N trained positions, and their gradient where `weight_N` (dL/d(-logp) of each) is given.

    Each slice is padded with zero rows to a multiple of 16, so that a row's result does not depend on how many
    others there are (design contract 1).
    """
    total = hidden_ND.shape[0]
    spare = -total % ROW_MULTIPLE
    hidden_ND, target_N = F.pad(hidden_ND, (0, 0, 0, spare)), F.pad(target_N, (0, spare))
    weight_N = F.pad(weight_N, (0, spare)) if weight_N is not None else None
    parts = [
        _slice_losses(head, hidden_ND[rows], target_N[rows], weight_N[rows] if weight_N is not None else None)
        for start in range(0, total, SLICE_ROWS)
        for rows in [slice(start, start + SLICE_ROWS)]
    ]
    if not parts:
        empty = hidden_ND.new_empty(0, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        return TokenLosses(empty, target_N.bool(), hidden_ND if weight_N is not None else None)
    return TokenLosses(
        torch.cat([part.logprob_N for part in parts])[:total],
        torch.cat([part.correct_N for part in parts])[:total],
        torch.cat([part.grad_ND for part in parts if part.grad_ND is not None])[:total]
        if weight_N is not None
        else None,
    )


def _slice_losses(head: Head, hidden_ND: Tensor, target_N: Tensor, weight_N: Tensor | None) -> TokenLosses:
    """One slice; its logits become the gradient of its rows in place."""
    logits_NV = head.logits(hidden_ND)
    top_N1, guess_N1 = logits_NV.max(dim=1, keepdim=True)
    target_N1 = target_N[:, None]
    score_N1 = logits_NV.gather(1, target_N1) - top_N1
    slope_NV = 1 - (logits_NV / head.softcap) ** 2 if head.softcap is not None and weight_N is not None else None
    odds_NV = logits_NV.sub_(top_N1).exp_()
    total_N1 = odds_NV.sum(dim=1, keepdim=True)
    logprob_N = (score_N1 - total_N1.log()).squeeze(1)
    correct_N = (guess_N1 == target_N1).squeeze(1)
    if weight_N is None:
        return TokenLosses(logprob_N, correct_N, None)
    weight_N1 = weight_N[:, None].to(odds_NV.dtype)
    delta_NV = odds_NV.mul_(weight_N1 / total_N1).scatter_add_(1, target_N1, -weight_N1)
    if slope_NV is not None:
        delta_NV *= slope_NV
    return TokenLosses(logprob_N, correct_N, delta_NV.to(hidden_ND.dtype) @ head.weight_VD)


def token_losses_plain(head: Head, hidden_ND: Tensor, target_N: Tensor, weight_N: Tensor | None) -> TokenLosses:
    """The twin of `token_losses`: whole logits, PyTorch's cross-entropy, autograd."""
    hidden_ND = hidden_ND.detach().requires_grad_(weight_N is not None)
    with torch.set_grad_enabled(weight_N is not None):
        logits_NV = head.logits(hidden_ND)
        loss_N = F.cross_entropy(logits_NV, target_N, reduction="none")
    grad = None
    if weight_N is not None:
        (grad,) = torch.autograd.grad(loss_N, hidden_ND, weight_N.to(loss_N.dtype))
    return TokenLosses(-loss_N.detach(), logits_NV.detach().argmax(dim=1) == target_N, grad)
