"""A sequence trained piece by piece against the same sequence whole: outputs, and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from muxtune.models import attention
from muxtune.models.attach import GivenRows, Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.kv_carry import KVCarry
from tests.tiny import SUPPORTED, tiny_model
from tests.tiny_tokenizer import VOCAB

TOTAL = 45
CUTS = [(45,), (30, 15), (7, 16, 1, 21), (1, 44), (16, 16, 13)]


class _Prefix:
    """Learned keys and values of each layer."""

    def __init__(self, backbone: Backbone, positions: int) -> None:
        generator = torch.Generator().manual_seed(11)
        _, groups, width = backbone.attention_shape
        self.leaves = [
            torch.randn(2, groups, positions, width, generator=generator, dtype=torch.float64).requires_grad_()
            for _ in backbone.blocks
        ]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self.leaves[layer].split(1)
        return key, value


def _backbone(arch: str) -> Backbone:
    attention.register()
    return Backbone(tiny_model(arch, dtype=torch.float64))


class _Sequence:
    """Ids of one sequence, input rows that ask for a gradient, and a prefix; what its rows are to weigh in a loss."""

    def __init__(self, backbone: Backbone, lead: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.ids = torch.randint(VOCAB, (TOTAL,), generator=generator)
        self.rows = backbone.model.get_input_embeddings().weight[self.ids].detach().clone().requires_grad_()
        self.prefix = _Prefix(backbone, lead) if lead else None
        self.lead = lead
        self.leaves = [self.rows, *(self.prefix.leaves if self.prefix is not None else [])]

    def piece(self, start: int, stop: int, carry: KVCarry | None) -> tuple[Tensor, Tensor, Pass]:
        """The pass of rows [start, stop), behind ten rows of somebody else."""
        spans = (self.prefix,) if self.prefix is not None and start == 0 else ()
        segments = [Segment(10), Segment(stop - start, 5 if carry is not None else None, spans)]
        given = [GivenRows(10, self.rows[start:stop])]
        positions = torch.cat([torch.arange(10), torch.arange(start, stop) + self.lead])
        ids = torch.cat([torch.arange(10), self.ids[start:stop]])
        return ids, positions, Pass(AttentionContext(segments, carry), {}, given)

    def loss(self, hidden_TD: Tensor, start: int, stop: int) -> Tensor:
        generator = torch.Generator().manual_seed(8)
        weights_TD = torch.randn(TOTAL, hidden_TD.shape[1], generator=generator, dtype=torch.float64)
        weights_TD[4:20] = 0  # a stretch of which nothing is trained: more than a piece
        return (hidden_TD[10:] * weights_TD[start:stop]).sum()


def _whole(backbone: Backbone, lead: int) -> tuple[Tensor, list[Tensor]]:
    sequence = _Sequence(backbone, lead)
    loss = sequence.loss(backbone.hidden(*sequence.piece(0, TOTAL, None)), 0, TOTAL)
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in sequence.leaves]


def _in_pieces(backbone: Backbone, lead: int, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    sequence, carry = _Sequence(backbone, lead), KVCarry()
    carry.open(5, TOTAL + lead)
    stops = list(accumulate(sizes))
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    losses = []
    for number, (start, stop) in enumerate([*spans[:-1], *spans[::-1]]):
        carry.seek(5, start + lead if start else 0)
        with torch.set_grad_enabled(number >= len(spans) - 1):
            hidden_TD = backbone.hidden(*sequence.piece(start, stop, carry))
            if torch.is_grad_enabled():
                loss = sequence.loss(hidden_TD, start, stop)
                loss.backward()
                losses.append(loss.detach())
    return torch.stack(losses).sum(), [leaf.grad for leaf in sequence.leaves]


@pytest.mark.parametrize("lead", [0, 3], ids=["bare", "prefix"])
@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_gradient_of_the_pieces_is_that_of_the_whole(arch: str, lead: int) -> None:
    """Of the input rows, so of everything that any position owes any other; windows and soft-caps included."""
    backbone = _backbone(arch)
    loss, grads = _whole(backbone, lead)
    for sizes in CUTS:
        own_loss, own_grads = _in_pieces(backbone, lead, sizes)
        assert torch.allclose(own_loss, loss, rtol=1e-10)
        for own, expected in zip(own_grads, grads, strict=True):
            assert bool(expected.any())
            assert torch.allclose(own, expected, rtol=1e-9, atol=1e-11), sizes


def test_it_holds_keys_values_and_their_gradients_and_nothing_else() -> None:
    backbone, carry = _backbone("llama"), KVCarry()
    sequence = _Sequence(backbone, 0)
    carry.open(5, TOTAL)
    one = len(backbone.blocks) * 2 * 2 * 16 * 8  # of a position: layers, a pair, heads, their width, bytes
    with torch.no_grad():
        backbone.hidden(*sequence.piece(0, 30, carry))
    assert carry.size_bytes == TOTAL * one
    carry.seek(5, 30)
    sequence.loss(backbone.hidden(*sequence.piece(30, TOTAL, carry)), 30, TOTAL).backward()
    assert carry.size_bytes == (TOTAL + 30) * one
    carry.close(5)
    assert carry.size_bytes == 0 and not carry.slots
