"""Which part of a model each rank of a tensor-parallel group holds: index ranges, from the sizes of a layer alone.

Attention is split by K/V group - a key/value head with the query heads that read it -, so no head is cut and no key is
held twice; a group count that the degree does not divide gives some ranks one group more. The feed-forward units are
then shared out so that the ranks' multiplications of a layer come out level: a rank with fewer groups gets more units.
The vocabulary is split evenly; embedding and head are held in the same ranges, so a tied table is one.

A BaseOp's ranges follow from its roles (`muxtune.models.recipes`), as in Megatron-LM (Shoeybi et al., 2019):

    column-parallel    q, k, v, mlp_in      ranges of the outputs; every rank reads all input rows
    row-parallel       o, mlp_out           ranges of the inputs; the outputs are partial sums
    by entry           embed, head          ranges of the vocabulary
    whole              norms and whatever has no role here

The boundary: integers and names, no torch. The scores of attention, which grow with a sequence's length, are not
counted: they follow the groups, and a layer has to be split before anybody knows a length.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from muxtune.errors import ConfigError

QUANTUM = 16  # units and entries that are shared out together: rows of products stay aligned


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """`mlp_products`: matrices of `width` x `units` in a feed-forward sublayer: 3 with a gate, else 2."""

    width: int
    heads: int
    groups: int
    head_width: int
    units: int
    vocabulary: int
    mlp_products: int = 3

    @property
    def group_heads(self) -> int:
        """Query heads of a group."""
        return self.heads // self.groups

    @property
    def group_work(self) -> int:
        """Multiplications a row that come with a group: its part of q and o, its k and v."""
        return 2 * self.width * self.head_width * (self.group_heads + 1)

    @property
    def unit_work(self) -> int:
        """Those that come with a feed-forward unit."""
        return self.mlp_products * self.width


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of every layer, and of the vocabulary."""

    groups: range
    units: range
    entries: range

    def work(self, sizes: LayerSizes) -> int:
        """Multiplications a row and layer."""
        return len(self.groups) * sizes.group_work + len(self.units) * sizes.unit_work


@dataclass(frozen=True, slots=True)
class Cut:
    """`ranges` of the outputs or inputs of a BaseOp, in order; of the whole operator, `full` of them."""

    side: Literal["out", "in"]
    ranges: tuple[range, ...]
    full: int

    @property
    def size(self) -> int:
        return sum(map(len, self.ranges))


def split(sizes: LayerSizes, ranks: int) -> tuple[Part, ...]:
    """A part for each rank. Raises ConfigError where there is not one group, unit and entry for each."""
    if sizes.heads % sizes.groups:
        raise ConfigError(f"{sizes.heads} query heads do not share {sizes.groups} key/value heads evenly", where="tp")
    scarce = {
        "key/value heads": sizes.groups,
        "feed-forward units": sizes.units,
        "entries of the vocabulary": sizes.vocabulary,
    }
    for what, count in scarce.items():
        if count < ranks:
            raise ConfigError(
                f"the model has {count} {what}, too few to be split over {ranks} ranks",
                where="tp",
                hint=f"tp: {count} at most",
            )
    groups = _runs(_even(sizes.groups, ranks))
    units = _runs(_level_units(sizes, [len(own) for own in groups]))
    entries = _runs(_in_quanta(sizes.vocabulary, [sizes.vocabulary / ranks] * ranks))
    return tuple(map(Part, groups, units, entries))


def cut_of(roles: Set[str], sizes: LayerSizes, part: Part) -> Cut | None:
    """What a rank with `part` holds of the BaseOp that has these roles; None: all of it.

    A fused linear has the roles of its pieces, whose outputs lie one after another: q, k, v.
    """
    width, heads, groups = sizes.head_width, _heads(sizes, part), part.groups
    projections = {
        "q": (sizes.heads * width, _scaled(heads, width)),
        "k": (sizes.groups * width, _scaled(groups, width)),
        "v": (sizes.groups * width, _scaled(groups, width)),
    }
    present = [name for name in projections if name in roles]
    if present:
        ranges, start = [], 0
        for name in present:
            full, own = projections[name]
            ranges.append(range(start + own.start, start + own.stop))
            start += full
        return Cut("out", tuple(ranges), start)
    if "o" in roles:
        return Cut("in", (_scaled(heads, width),), sizes.heads * width)
    if "mlp_in" in roles:
        return Cut("out", (part.units,), sizes.units)
    if "mlp_out" in roles:
        return Cut("in", (part.units,), sizes.units)
    if "embed" in roles:
        return Cut("in", (part.entries,), sizes.vocabulary)
    if "head" in roles:
        return Cut("out", (part.entries,), sizes.vocabulary)
    return None


def _heads(sizes: LayerSizes, part: Part) -> range:
    return _scaled(part.groups, sizes.group_heads)


def _scaled(own: range, factor: int) -> range:
    return range(own.start * factor, own.stop * factor)


def _even(count: int, ranks: int) -> list[int]:
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def _level_units(sizes: LayerSizes, groups: list[int]) -> list[int]:
    """Units that level the ranks' work, most to those with the fewest groups; a quantum at least to each."""
    least = min(QUANTUM, sizes.units // len(groups))
    spare = sizes.units - least * len(groups)
    loads = [own * sizes.group_work / sizes.unit_work for own in groups]  # in units
    level = _water_level(loads, spare)
    return _in_quanta(sizes.units, [least + max(0.0, level - load) for load in loads])


def _water_level(loads: list[float], spare: float) -> float:
    """The level at which `spare` fills the loads from the lowest up."""
    filled = 0.0
    ordered = sorted(loads)
    for count, (low, high) in enumerate(pairwise(ordered), start=1):
        step = (high - low) * count
        if filled + step >= spare:
            return low + (spare - filled) / count
        filled += step
    return ordered[-1] + (spare - filled) / len(ordered)


def _in_quanta(total: int, wished: list[float]) -> list[int]:
    """Whole quanta near `wished`, which adds up to `total`, none of them nothing; the last rank has what is over."""
    quantum = QUANTUM if total >= QUANTUM * len(wished) else 1
    edges, done, wish = [0], 0, 0.0
    for rank, own in enumerate(wished[:-1]):
        wish += own
        last = total - quantum * (len(wished) - 1 - rank)  # leaves one for each that follows
        done = min(max(round(wish / quantum) * quantum, done + quantum), last - last % quantum)
        edges.append(done)
    return [stop - start for start, stop in pairwise([*edges, total])]


def _runs(counts: list[int]) -> list[range]:
    """Consecutive ranges of these lengths, from 0 on."""
    found, start = [], 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return found
