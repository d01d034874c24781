"""The order inside a stage: legal, known closed forms, and how far it is from the best order of small cases."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.overlap import Chain, Launch, Subgraph, backward_chain, forward_chain, list_schedule

SECONDS = st.integers(0, 9).map(float)
CHAINS = st.lists(
    st.lists(st.builds(Subgraph, SECONDS, SECONDS), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5
)


def _end(launches: tuple[Launch, ...]) -> float:
    return max(launch.collective_end_s for launch in launches)


def _total(chain: Chain) -> float:
    return sum(subgraph.compute_s + subgraph.collective_s for subgraph in chain)


@given(CHAINS, st.data())
def test_schedules_are_legal_and_deterministic(chains: list[Chain], data: st.DataObject) -> None:
    release = data.draw(st.lists(SECONDS, min_size=len(chains), max_size=len(chains)))
    compute_free, link_free = data.draw(SECONDS), data.draw(SECONDS)
    launches = list_schedule(chains, release, compute_free_s=compute_free, link_free_s=link_free)
    assert launches == list_schedule(chains, release, compute_free_s=compute_free, link_free_s=link_free)
    for number, chain in enumerate(chains):
        own = [launch for launch in launches if launch.chain == number]
        assert [launch.place for launch in own] == list(range(len(chain)))
        assert own[0].start_s >= max(release[number], compute_free)
        assert all(before.collective_end_s <= after.start_s for before, after in pairwise(own))
        for launch, subgraph in zip(own, chain, strict=True):
            assert launch.end_s - launch.start_s == subgraph.compute_s
            assert launch.collective_start_s >= launch.end_s
            assert launch.collective_end_s - launch.collective_start_s == subgraph.collective_s
            assert not subgraph.collective_s or launch.collective_start_s >= link_free
    for spans in (
        [(launch.start_s, launch.end_s) for launch in launches],
        [(launch.collective_start_s, launch.collective_end_s) for launch in launches],
    ):
        busy = sorted((start, end) for start, end in spans if end > start)
        assert all(before[1] <= after[0] for before, after in pairwise(busy)), "one thing at a time"


@given(CHAINS)
def test_it_takes_no_more_than_all_work_and_no_less_than_its_bounds(chains: list[Chain]) -> None:
    end = _end(list_schedule(chains))
    compute = sum(subgraph.compute_s for chain in chains for subgraph in chain)
    collectives = sum(subgraph.collective_s for chain in chains for subgraph in chain)
    least = max(compute, collectives, *(_total(chain) for chain in chains))
    assert least <= end <= compute + collectives <= 2 * least


@pytest.mark.parametrize("layers", [1, 3, 8])
def test_two_equal_htasks_hide_each_others_collectives(layers: int) -> None:
    """Collectives are no longer than the shorter subgraph: all but the very last one are hidden."""
    for chain in (forward_chain(layers, 9.0, 3.0), backward_chain(layers, 9.0, 2.0)):
        alone, both = _end(list_schedule([chain])), _end(list_schedule([chain, chain]))
        assert alone == _total(chain)
        assert both == 2 * sum(subgraph.compute_s for subgraph in chain) + chain[-1].collective_s


def test_without_collectives_the_order_does_not_matter() -> None:
    chains = [forward_chain(3, 6.0, 0.0), forward_chain(3, 3.0, 0.0, exit_s=5.0)]
    assert _end(list_schedule(chains)) == 18 + 9 + 5


def test_chains_of_layers() -> None:
    first, mlp, attention, last, leave = forward_chain(2, 9.0, 1.0, entry_s=4.0, exit_s=5.0)
    assert (first, mlp, attention) == (Subgraph(7.0, 1.0), Subgraph(6.0, 1.0), Subgraph(3.0, 1.0))
    assert (last, leave) == (mlp, Subgraph(5.0))
    assert backward_chain(2, 9.0, 1.0) == (mlp, attention) * 2
    assert len(forward_chain(2, 9.0, 1.0)) == 4


def _best(chains: list[Chain]) -> float:
    """The least of all orders, by trying which operation to append next."""
    operations = [
        [
            (kind, seconds)
            for part in chain
            for kind, seconds in ((0, part.compute_s), (1, part.collective_s))
            if seconds
        ]
        for chain in chains
    ]
    best = sum(map(_total, chains))

    def search(done: tuple[int, ...], ready: tuple[float, ...], free: tuple[float, float]) -> None:
        nonlocal best
        rest = [one for own, place in zip(operations, done, strict=True) for one in own[place:]]
        if not rest:
            best = min(best, max(ready))
            return
        if any(free[kind] + sum(one[1] for one in rest if one[0] == kind) >= best for kind in (0, 1)):
            return
        for chain, own in enumerate(operations):
            if done[chain] < len(own):
                kind, seconds = own[done[chain]]
                end = max(free[kind], ready[chain]) + seconds
                search(
                    tuple(place + (number == chain) for number, place in enumerate(done)),
                    tuple(end if number == chain else at for number, at in enumerate(ready)),
                    (end, free[1]) if kind == 0 else (free[0], end),
                )

    search((0,) * len(chains), (0.0,) * len(chains), (0.0, 0.0))
    return best


def _small(rng: random.Random) -> list[Chain]:
    """Two hTasks of up to four subgraphs or three of up to two; half of them are layers."""
    count = rng.choice((2, 3))
    if rng.random() < 0.5:
        return [
            forward_chain(rng.randint(1, 4 // count), float(rng.randint(1, 9)), float(rng.randint(0, 6)))
            for _ in range(count)
        ]
    lengths = [rng.randint(1, 4 if count == 2 else 2) for _ in range(count)]
    return [
        tuple(Subgraph(float(rng.randint(1, 9)), float(rng.randint(0, 9))) for _ in range(length)) for length in lengths
    ]


def test_the_gap_to_the_best_order_of_small_cases() -> None:
    rng = random.Random(7)
    gaps = []
    for _ in range(300):
        chains = _small(rng)
        gaps.append(_end(list_schedule(chains)) / _best(chains))
    assert min(gaps) >= 1 - 1e-12
    assert mean(gaps) <= 1.05
    assert sorted(gaps)[int(0.9 * len(gaps))] <= 1.15
    assert max(gaps) <= 1.5
