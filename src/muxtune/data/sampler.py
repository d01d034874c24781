"""Which examples make up each optimizer batch: a pure function of (seed, step), so resuming needs no state.

Epoch e is the stable order of examples by a 64-bit key each: example i of epoch e gets splitmix64's output number i of
the stream that starts at the first 8 bytes of SHA-256("muxtune/order/SEED/EPOCH"). That map is a bijection of 64-bit
words, so keys never tie and the order is the same on every machine and numpy version (numpy promises its own
generators' streams only within a version). Sorting costs O(n log n) an epoch, under half a second for a million
examples; no order depends on an earlier one, on other jobs or on what ran before.

Batches do not cross epochs: the last of an epoch is smaller where the batch size does not divide n.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def seeded_order(n: int, stream: str) -> Indices:
    """A permutation of range(n), a function of `n` and the name of the stream alone."""
    start = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable").astype(np.int64)


def epoch_order(n: int, seed: int, epoch: int, *, shuffle: bool = True) -> Indices:
    """The order in which epoch `epoch` (from 0) visits the examples 0..n-1."""
    return seeded_order(n, f"muxtune/order/{seed}/{epoch}") if shuffle else np.arange(n, dtype=np.int64)


class Sampler:
    """The optimizer batches of one job over `n` groups of examples.

    `step` counts from 0: `batch(k)` is the batch of the optimizer step that is taken after k steps are done. Steps
    beyond an epoch go on in the next, without end (`max_steps` loops the data).
    """

    def __init__(self, n: int, batch: int, seed: int, *, shuffle: bool = True) -> None:
        assert n > 0 and batch > 0, (n, batch)
        self.n = n
        self.batch_size = batch
        self.seed = seed
        self.shuffle = shuffle
        self._held: tuple[int, Indices] | None = None  # the last epoch's order: saves the sort, decides nothing

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.n // self.batch_size)

    def batch(self, step: int) -> tuple[int, ...]:
        """Indices of the examples of a step, in order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return tuple(self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size].tolist())

    def epoch_after(self, steps: int) -> float:
        """Epochs done after `steps` steps, as trainers print it."""
        return steps / self.steps_per_epoch

    def _order(self, epoch: int) -> Indices:
        if self._held is None or self._held[0] != epoch:
            self._held = (epoch, epoch_order(self.n, self.seed, epoch, shuffle=self.shuffle))
        return self._held[1]
