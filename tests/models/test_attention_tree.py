"""Attention on trees against each sequence alone, by the packed attention itself, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.attention_tree import BLOCK_ROWS, Branch, grown
from tests.models.test_attention import SHAPES, Shape, _rows, _run

Ranges = tuple[tuple[int, int], ...]


class _Learned:
    """Two positions before everything."""

    def __init__(self, groups: int) -> None:
        self.pair = tuple(_rows(groups, 2, seed).requires_grad_() for seed in (11, 12))

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pair[0], self.pair[1]


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, Ranges]]:
    """Rows of each branch and what it sees: some first rows of the path of the one before."""
    root = draw(st.integers(1, 12))
    made: list[tuple[int, Ranges]] = [(root, ())]
    path, start = [(0, root)], root
    for _ in range(draw(st.integers(1, 5))):
        left = draw(st.integers(1, sum(b - a for a, b in path)))
        seen = []
        for a, b in path:
            if left > 0:
                seen.append((a, min(b, a + left)))
            left -= b - a
        rows = draw(st.integers(1, 6))
        made.append((rows, tuple(seen)))
        path = [*seen, (start, start + rows)]
        start += rows
    return made


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned"])
@given(tree=trees())
def test_each_branch_attends_as_its_sequence_alone(name: str, learned: bool, tree: list[tuple[int, Ranges]]) -> None:
    shape = SHAPES[name]
    total = sum(rows for rows, _ in tree)
    spans = (_Learned(shape.groups),) if learned else ()
    q, k, v = (_rows(heads, total + 3, seed) for seed, heads in enumerate((shape.heads, shape.groups, shape.groups)))
    paths, start = [], 0
    for rows, seen in tree:
        paths.append(torch.cat([torch.arange(a, b) for a, b in (*seen, (start, start + rows))]))
        start += rows
    apart = [Segment(len(path), spans=spans) for path in paths]
    together = [Segment(rows, spans=spans, seen=seen) for rows, seen in tree]
    after = torch.arange(total, total + 3)
    every = torch.cat([*paths, after])  # each sequence whole, and one more that is in no tree
    leaves = [rows.clone().requires_grad_() for rows in (q, k, v)]
    taken = [leaf[:, :, every] for leaf in leaves]
    ends = torch.tensor([len(path) for path in paths]).cumsum(0)
    own = [torch.arange(end - rows, end) for end, (rows, _) in zip(ends.tolist(), tree, strict=True)]
    expected = _of(shape, [*apart, Segment(3)], taken, leaves, spans, torch.cat([*own, after - total + int(ends[-1])]))
    found = _of(shape, [*together, Segment(3)], leaves, leaves, spans, torch.arange(total + 3))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def _of(
    shape: Shape,
    segments: Sequence[Segment],
    rows: Sequence[Tensor],
    leaves: Sequence[Tensor],
    spans: Sequence[_Learned],
    order: Tensor,
) -> list[Tensor]:
    """The output at some of the rows, and gradients where these are weighed by their places."""
    found = _run(AttentionContext(segments), *rows, shape)[0][order]
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    learned = [tensor for span in spans for tensor in span.pair]
    return [found.detach(), *torch.autograd.grad(found, [*leaves, *learned], weights)]


def test_rests_go_together_up_to_a_block() -> None:
    half = BLOCK_ROWS // 2
    ends = [10, 10 + half, 10 + 2 * half, 11 + 2 * half, 11 + 2 * half + 3 * BLOCK_ROWS]
    branches = [Branch(0, 10), *(Branch(a, b, ((0, 4),)) for a, b in pairwise(ends))]
    tree = grown(branches)
    assert (tree.root, tree.rows) == (10, ends[-1]) and tree.sizes[:2] == (4, 6)
    assert [(block.start, block.stop) for block in tree.blocks] == [
        (10, ends[2]),
        (ends[2], ends[3]),
        (ends[3], ends[4]),
    ]
    assert tree.blocks[0].parts == [0, 2, 3], "not what nobody there sees"
    assert [(block.start, block.stop) for block in tree.small] == list(pairwise(ends)), "where scores are kept"
