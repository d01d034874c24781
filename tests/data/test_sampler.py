"""The order of training: every example once an epoch, a function of (seed, step) alone."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.sampler import Sampler, epoch_order, seeded_order

NAMES = {"n": st.integers(1, 60), "batch": st.integers(1, 70), "seed": st.integers(0, 2**63 - 1)}


@given(**NAMES, epochs=st.integers(1, 4), shuffle=st.booleans())
def test_an_epoch_visits_every_example_once(n: int, batch: int, seed: int, epochs: int, shuffle: bool) -> None:
    sampler = Sampler(n, batch, seed, shuffle=shuffle)
    for epoch in range(epochs):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        batches = [sampler.batch(step) for step in steps]
        seen = list(itertools.chain(*batches))
        assert sorted(seen) == list(range(n))
        assert [len(one) for one in batches[:-1]] == [batch] * (len(batches) - 1)
        assert len(batches[-1]) == n - batch * (len(batches) - 1) > 0
        assert shuffle or seen == list(range(n))


@given(**NAMES, steps=st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_a_batch_depends_on_its_step_alone(n: int, batch: int, seed: int, steps: list[int]) -> None:
    """Whatever was asked before - from another epoch, forwards or back - a fresh sampler says the same (resume)."""
    used = Sampler(n, batch, seed)
    assert [used.batch(step) for step in steps] == [Sampler(n, batch, seed).batch(step) for step in steps]


def test_resuming_inside_a_later_epoch_replays_no_earlier_order() -> None:
    whole = Sampler(10, 3, seed=7)
    undisturbed = [whole.batch(step) for step in range(12)]
    resumed = Sampler(10, 3, seed=7)
    assert [resumed.batch(step) for step in range(6, 12)] == undisturbed[6:]
    first, second, third = (list(itertools.chain(*undisturbed[at : at + 4])) for at in (0, 4, 8))
    assert first != second != third != first


def test_the_order_is_the_documented_one() -> None:
    """Written out with Python's integers, so that neither numpy nor a rewrite can change a run's order unnoticed."""

    def splitmix(start: int, number: int) -> int:
        z = (start + number * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    start = int.from_bytes(hashlib.sha256(b"muxtune/order/42/3").digest()[:8], "little")
    expected = sorted(range(100), key=lambda i: splitmix(start, i + 1))
    assert epoch_order(100, 42, 3).tolist() == expected


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(epoch_order(20, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_orders_are_uniform() -> None:
    """Chi-squared of (example, place) over many epochs: 9801 degrees of freedom, six standard deviations."""
    n, epochs = 100, 2000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), epoch_order(n, 1, epoch)] += 1
    expected = epochs / n
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = (n - 1) ** 2
    assert abs(statistic - freedom) < 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_orders(n: int) -> None:
    assert sorted(seeded_order(n, "any").tolist()) == list(range(n))


def test_epochs_done() -> None:
    sampler = Sampler(10, 4, seed=0)
    assert (sampler.steps_per_epoch, sampler.epoch_after(3), sampler.epoch_after(4)) == (3, 1.0, 4 / 3)
