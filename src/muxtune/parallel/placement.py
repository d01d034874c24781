"""What a rank holds of a tensor of an adapter: ranges of it, single places of it, or all.

Slice      the ranges that its operator has                its gradient is whole
Picked     numbers here and there (of a sparse delta)      its gradient is whole
partial    all ranks have all; each sees a part of the work     its gradient is a part of a sum
whole      all ranks have all and do the same work with it      its gradient is whole
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from muxtune.parallel.slices import Slice


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """Numbers `index_p`, ascending, of a vector."""

    index_p: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Those, a copy."""
        return whole[self.index_p]


Placement = Slice | Picked | Literal["partial", "whole"]
Placements = dict[str, Placement]  # by name


def own_part(whole: Tensor, placement: Placement) -> Tensor:
    """The rank's part of a tensor."""
    return whole if isinstance(placement, str) else placement.of(whole)


def put_part(full: Tensor, part: Tensor, placement: Slice | Picked) -> None:
    """Write the rank's part into a tensor as wide as the whole."""
    if isinstance(placement, Picked):
        full[placement.index_p] = part
        return
    start = 0
    for own in placement.ranges:
        full.narrow(placement.dim, own.start, len(own)).copy_(part.narrow(placement.dim, start, len(own)))
        start += len(own)


def places_in(cut_ranges: tuple[range, ...], full: int, at_P: Tensor) -> tuple[Tensor, Tensor]:
    """Which of some coordinates lie in the ranges, and their coordinates there."""
    table = torch.full((full,), -1, dtype=torch.int64)
    start = 0
    for own in cut_ranges:
        table[own.start : own.stop] = torch.arange(start, start + len(own))
        start += len(own)
    local_P = table[at_P]
    index_p = (local_P >= 0).nonzero()[:, 0]
    return index_p, local_P[index_p]
