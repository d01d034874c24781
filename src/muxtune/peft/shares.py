"""Whose rows are whose at one attach point: a micro-batch's rows in parts, some of which go to a module.

Legend: T rows of a micro-batch, X features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from muxtune.peft.base import AdapterModule, Dispatch, HandWritten
from muxtune.peft.dropout import RowKeys
from muxtune.peft.grouped import Rule, runs
from muxtune.peft.traced import Traced


@dataclass(frozen=True, slots=True)
class Share:
    """A module and the rows it gets: part `part` of the rows as `Shares.sizes` splits them."""

    part: int
    module: AdapterModule
    keys: RowKeys | None

    def steps(self, training: bool) -> HandWritten:
        return cast("HandWritten", self.module) if self.module.by_hand else Traced(self.module, training)


@dataclass(frozen=True, slots=True)
class Shares:
    """What happens at one attach point. Rows are split once for all modules, those of nobody into parts of their own:
    a split costs a third of as many slices, and its backward is one concatenation. The last part is the rest."""

    sizes: tuple[int, ...]
    members: tuple[Share, ...]

    def split(self, rows_TX: Tensor) -> tuple[Tensor, ...]:
        rest = rows_TX.shape[0] - sum(self.sizes)
        return rows_TX.split_with_sizes((*self.sizes, rest))


def shares(name: str, dispatches: Sequence[Dispatch], rule: Rule) -> Shares:
    """The dispatches at attach point `name`, in the order of their rows; with `rule`, alike ones joined."""
    sizes: list[int] = []
    members: list[Share] = []
    done = 0
    for run in runs(name, dispatches, rule):
        assert done <= run.start < run.stop, "dispatched rows overlap"
        if run.start > done:
            sizes.append(run.start - done)
        sizes.append(run.stop - run.start)
        members.append(Share(len(sizes) - 1, run.module, run.keys))
        done = run.stop
    return Shares(tuple(sizes), tuple(members))
