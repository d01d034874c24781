"""Splits of a model: every index once, no head cut, the ranks' work level."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.parallel.shard import QUANTUM, Cut, LayerSizes, Part, cut_of, split

SMOLLM2 = LayerSizes(576, 9, 3, 64, 1536, 49152)
ROLES = ("q", "k", "v", "o", "mlp_in", "mlp_out", "embed", "head")


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerSizes, int]:
    """Sizes, and a degree that they have enough for."""
    ranks = draw(st.integers(1, 8))
    groups = draw(st.integers(ranks, 24))
    sizes = LayerSizes(
        width=draw(st.integers(1, 512)),
        heads=groups * draw(st.integers(1, 6)),
        groups=groups,
        head_width=draw(st.integers(1, 128)),
        units=draw(st.integers(ranks, 4096)),
        vocabulary=draw(st.integers(ranks, 60000)),
        mlp_products=draw(st.sampled_from([2, 3])),
    )
    return sizes, ranks


def _whole(sizes: LayerSizes, role: str) -> int:
    width = sizes.head_width
    if role in ("embed", "head"):
        return sizes.vocabulary
    return {
        "q": sizes.heads * width,
        "o": sizes.heads * width,
        "k": sizes.groups * width,
        "v": sizes.groups * width,
    }.get(role, sizes.units)


def _cuts(roles: set[str], sizes: LayerSizes, parts: tuple[Part, ...]) -> list[Cut]:
    found = [cut_of(roles, sizes, part) for part in parts]
    assert all(cut is not None for cut in found)
    return [cut for cut in found if cut is not None]


@given(layers())
def test_the_ranges_of_every_operator_partition_it(case: tuple[LayerSizes, int]) -> None:
    sizes, ranks = case
    parts = split(sizes, ranks)
    assert len(parts) == ranks
    for role in ROLES:
        cuts = _cuts({role}, sizes, parts)
        assert [index for cut in cuts for own in cut.ranges for index in own] == list(range(_whole(sizes, role)))
        assert all(cut.size > 0 and cut.full == _whole(sizes, role) for cut in cuts)
    fused = [index for cut in _cuts({"q", "k", "v"}, sizes, parts) for own in cut.ranges for index in own]
    assert sorted(fused) == list(range((sizes.heads + 2 * sizes.groups) * sizes.head_width))


@given(layers())
def test_no_head_is_cut_and_queries_stay_with_their_keys(case: tuple[LayerSizes, int]) -> None:
    sizes, ranks = case
    width, shared = sizes.head_width, sizes.heads // sizes.groups
    for part in split(sizes, ranks):
        (q,), (k,), (v,), (o,) = (_cuts({role}, sizes, (part,))[0].ranges for role in ("q", "k", "v", "o"))
        assert k == v and q == o
        assert q.start == k.start * shared and q.stop == k.stop * shared
        assert k.start % width == 0 == k.stop % width
        fused = _cuts({"q", "k", "v"}, sizes, (part,))[0].ranges
        assert [len(own) for own in fused] == [len(q), len(k), len(v)]


@given(layers())
def test_the_work_is_level_as_far_as_whole_groups_and_quanta_allow(case: tuple[LayerSizes, int]) -> None:
    """Nobody has more than its share and what cannot be divided: a quantum, or the groups that nobody could take."""
    sizes, ranks = case
    parts = split(sizes, ranks)
    works = [part.work(sizes) for part in parts]
    fair = sum(works) / ranks
    floor = max(len(part.groups) for part in parts) * sizes.group_work
    assert max(works) <= max(fair, floor) + (ranks + 1) * QUANTUM * sizes.unit_work
    counts = [len(part.groups) for part in parts]
    assert max(counts) - min(counts) <= 1


def test_the_embedded_models_layers_are_level_within_two_hundredths() -> None:
    one, other = split(SMOLLM2, 2)
    assert (len(one.groups), len(other.groups)) == (2, 1)
    assert len(one.units) < len(other.units)
    assert all(len(own) % QUANTUM == 0 for part in (one, other) for own in (part.units, part.entries))
    works = [part.work(SMOLLM2) for part in (one, other)]
    assert max(works) / min(works) < 1.02


def test_one_rank_holds_everything() -> None:
    (part,) = split(SMOLLM2, 1)
    assert part == Part(range(3), range(1536), range(49152))


def test_a_norm_is_whole() -> None:
    assert cut_of(frozenset({"norm"}), SMOLLM2, split(SMOLLM2, 2)[0]) is None


def test_ranges_are_consecutive() -> None:
    parts = split(SMOLLM2, 3)
    assert all(one.entries.stop == other.entries.start for one, other in pairwise(parts))


def test_more_ranks_than_key_value_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 key/value heads") as refused:
        split(SMOLLM2, 4)
    assert "tp: 3" in str(refused.value)
