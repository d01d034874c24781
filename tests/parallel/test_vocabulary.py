"""A head in two parts computes what the whole one does: losses, argmax with ties, gradients, logits."""

from __future__ import annotations

import torch
from torch import Tensor

from muxtune.models.loss import Head, TokenLosses, token_losses, token_losses_plain
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.parallel.ranks import RankGroup

ENTRIES = (range(48), range(48, 70))


def _draw() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, rows, targets and weights of these. Some entries are alike, on one rank and on both, and all logits are
    exact, so that these tie whatever the kernel."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, (70, 16), generator=generator).double() / 8
    for one, same in ((3, 7), (5, 60), (50, 69)):
        weight[same] = weight[one]
    rows = torch.randint(-8, 9, (40, 16), generator=generator).double() / 8
    for row, entry in enumerate((3, 5, 60, 50, 69, 7, 3, 60)):
        rows[row] = 2 * weight[entry]  # the highest of all, and its double
    target = torch.randint(70, (40,), generator=generator)
    target[:8] = torch.tensor([3, 5, 60, 50, 69, 7, 7, 5])
    return weight, rows, target, torch.rand(40, generator=generator, dtype=torch.float64)


def _losses(head: Head) -> list[TokenLosses]:
    _, rows, target, weight = _draw()
    kinds = (token_losses, token_losses_plain)
    return [losses(head, rows, target, asked) for losses in kinds for asked in (weight, None)]


def _on_rank(axis: TensorAxis, softcap: float | None) -> tuple[list[TokenLosses], Tensor, Tensor]:
    own = ENTRIES[axis.rank]
    weight, rows, target, _ = _draw()
    mine = weight[own.start : own.stop]
    head = VocabularyHead(mine, torch.linspace(0, 1, 70).double()[list(own)], softcap, "lm_head", own, 70, axis)
    embedding = VocabularyEmbedding(torch.nn.Parameter(mine, requires_grad=False), own, axis, None)
    return _losses(head), head.logits(rows), embedding(target[None])


def test_two_parts_equal_the_whole(pair: RankGroup) -> None:
    weight, rows, target, _ = _draw()
    for softcap in (None, 3.0):
        whole = Head(weight, torch.linspace(0, 1, 70).double(), softcap)
        expected = _losses(whole)
        for found, logits, looked_up in pair.ask(_on_rank, softcap):
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one.logprob_N, other.logprob_N, rtol=0, atol=1e-12)
                assert torch.equal(one.correct_N, other.correct_N)
                assert (one.grad_ND is None) == (other.grad_ND is None)
                if one.grad_ND is not None and other.grad_ND is not None:
                    assert torch.allclose(one.grad_ND, other.grad_ND, rtol=0, atol=1e-12)
            assert torch.allclose(logits, whole.logits(rows), rtol=0, atol=1e-12)
            assert torch.equal(looked_up, weight[target][None])


def test_without_a_bias_ties_go_to_the_first_entry(pair: RankGroup) -> None:
    weight, rows, target, _ = _draw()
    expected = token_losses(Head(weight), rows, target, None).correct_N
    assert expected[:8].tolist() == [True, True, False, True, False, False, False, True]
    for found in pair.ask(_correct):
        assert torch.equal(found, expected)


def _correct(axis: TensorAxis) -> Tensor:
    own = ENTRIES[axis.rank]
    weight, rows, target, _ = _draw()
    head = VocabularyHead(weight[own.start : own.stop], None, None, "lm_head", own, 70, axis)
    return token_losses(head, rows, target, None).correct_N
