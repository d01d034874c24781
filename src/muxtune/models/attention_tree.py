"""Attention of sequences that begin alike: what they have in common is computed once, each rest sees it.

The rows of a tree lie one after another: a whole sequence, its *root*, then the rests of others, each with the rows it
sees before itself - of the root, or of rests before it. The root attends as any sequence does. Rests go together, some
`BLOCK_ROWS` rows of them a call, on the keys and values of all that any of these sees and of their own rows, under a
mask that says whose is whose. What rests owe to common rows adds up in autograd, always in one order.

A call for each rest took longer, several times so where rests are short (docs/log.md): the scores that a mask hides
cost less than calls and copies.

Cost: the scores of a block are its rows times all that its rests see; keys and values that a block sees are copied.

Legend: T rows of the tree, S of a block, N keys that it sees, P learned ones before all others, H query heads, G
key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

BLOCK_ROWS = 128
SPARING_ROWS = 32  # where scores are kept

RowRange = tuple[int, int]  # rows [start, stop)
Pair = tuple[Tensor, Tensor]


class Attend(Protocol):
    """q [1, H, S, K], k and v [1, G, N, K] -> [1, H, S, K]: causal, or as `shape` says who sees whom."""

    def __call__(self, q_1HSK: Tensor, k_1GNK: Tensor, v_1GNK: Tensor, shape: Block | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows [start, stop) of the tree, and the ranges of rows that they see before themselves."""

    start: int
    stop: int
    seen: tuple[RowRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of the tree, of whole rests, on the keys of some parts of its rows, those of `paths` - a path
    is what one rest sees, itself included. Masks are made once for all layers."""

    start: int
    stop: int
    sizes: Sequence[int]  # of all parts of the tree
    paths: Sequence[tuple[int, Sequence[int]]]  # rows of each rest, and the parts on its path
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def parts(self) -> list[int]:
        """In the order of its keys."""
        return sorted({part for _, path in self.paths for part in path})

    def visible(self, keys: int, window: int | None, like: Tensor) -> Tensor:
        """bool [S, N]: which of N keys each row sees, at most `window` of them; learned ones are the first."""
        shape = (keys, window, torch.bool)
        if shape not in self.masks:
            self.masks[shape] = self._made(keys, window).to(like.device)
        return self.masks[shape]

    def bias(self, keys: int, window: int | None, like: Tensor) -> Tensor:
        """The same to be added to scores, [S, N] of `like`'s precision."""
        shape = (keys, window, like.dtype)
        if shape not in self.masks:
            hidden_SN = ~self.visible(keys, window, like)
            self.masks[shape] = like.new_zeros(hidden_SN.shape).masked_fill_(hidden_SN, float("-inf"))
        return self.masks[shape]

    def _made(self, keys: int, window: int | None) -> Tensor:
        parts = self.parts
        learned = keys - sum(self.sizes[part] for part in parts)
        ends = accumulate((self.sizes[part] for part in parts), initial=learned)
        column_of = dict(zip(parts, pairwise(ends), strict=True))
        visible_SN = torch.zeros(self.stop - self.start, keys, dtype=torch.bool)
        row = 0
        for rows, path in self.paths:
            column_N = torch.cat([torch.arange(learned), *(torch.arange(*column_of[part]) for part in path)])
            query_S1 = torch.arange(len(column_N) - rows, len(column_N))[:, None]
            key_1N = torch.arange(len(column_N))[None, :]
            own_SN = key_1N <= query_S1
            if window is not None:
                own_SN &= key_1N > query_S1 - window
            visible_SN[row : row + rows, column_N] = own_SN
            row += rows
        return visible_SN


@dataclass(frozen=True, slots=True)
class Tree:
    """`sizes` are those of the parts that its rows are cut into, wherever a branch or what one sees begins or ends.
    `small` are blocks of fewer rests than `blocks`."""

    root: int
    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]
    small: tuple[Block, ...]

    @property
    def rows(self) -> int:
        return sum(self.sizes)


def grown(branches: Sequence[Branch]) -> Tree:
    """A tree of its branches, the root first."""
    ends = {end for one in branches for pair in (*one.seen, (one.start, one.stop)) for end in pair}
    cuts = sorted(ends)
    part_at = {start: part for part, start in enumerate(cuts)}
    sizes = tuple(stop - start for start, stop in pairwise(cuts))
    rests: list[Block] = []
    for one in branches[1:]:
        ranges = (*one.seen, (one.start, one.stop))
        path = [part for start, stop in ranges for part in range(part_at[start], part_at[stop])]
        rests.append(Block(one.start, one.stop, sizes, [(one.stop - one.start, path)]))
    return Tree(branches[0].stop, sizes, _joined(rests, BLOCK_ROWS), _joined(rests, SPARING_ROWS))


def _joined(rests: Sequence[Block], rows: int) -> tuple[Block, ...]:
    """Neighbours as one block, as far as they have so many rows together."""
    blocks: list[Block] = []
    for rest in rests:
        if blocks and rest.stop - blocks[-1].start <= rows:
            first = blocks.pop()
            rest = Block(first.start, rest.stop, rest.sizes, [*first.paths, *rest.paths])
        blocks.append(rest)
    return tuple(blocks)


def tree_attention(
    attend: Attend,
    tree: Tree,
    q_1HTK: Tensor,
    k_1GTK: Tensor,
    v_1GTK: Tensor,
    before: Sequence[Pair] = (),
    *,
    sparing: bool = False,
) -> Tensor:
    """[1, H, T, K]. `before`: keys and values that all branches see before anything else, [1, G, P, K] each.

    `sparing`: scores that a mask hides are few, where they are kept for the backward pass.
    """
    blocks = tree.small if sparing else tree.blocks
    root_1HSK, *rest = q_1HTK.split([tree.root, *(block.stop - block.start for block in blocks)], dim=2)
    found = [attend(root_1HSK, *after(before, k_1GTK[:, :, : tree.root], v_1GTK[:, :, : tree.root]))]
    keys, values = k_1GTK.split(tree.sizes, dim=2), v_1GTK.split(tree.sizes, dim=2)
    for block, own_1HSK in zip(blocks, rest, strict=True):
        *seen, (k, v) = [(keys[part], values[part]) for part in block.parts]
        found.append(attend(own_1HSK, *after([*before, *seen], k, v), shape=block))
    return torch.cat(found, dim=2)


def after(before: Sequence[Pair], k_1GSK: Tensor, v_1GSK: Tensor) -> Pair:
    """Keys and values of what comes before the rows and then theirs, in the rows' precision."""
    if not before:
        return k_1GSK, v_1GSK
    return (
        torch.cat([*(k.to(k_1GSK.dtype) for k, _ in before), k_1GSK], dim=2),
        torch.cat([*(v.to(v_1GSK.dtype) for _, v in before), v_1GSK], dim=2),
    )
