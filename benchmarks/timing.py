"""Interleaved measurement: a noisy machine is noisy for every side alike.

Round r runs step r of every side, in an order that turns by one each round; the first rounds are not counted. Figures
are medians; ratios are medians of the rounds' own ratios, so that a slow minute hits numerator and denominator both.

A process that runs one side alone has the memory of its last step for the next. Here another side ran in between, and
what that one freed went back to the system, so each would pay for new pages (33,000 a light step, 8 % of its time).
`interleave` therefore has the allocator keep what is freed. All sides take denormal numbers as zero, as ours does.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from muxtune.models.denormals import flushing

Step = Callable[[int], None]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h names them
_MOST_MMAP_THRESHOLD = 32 << 20  # that glibc takes


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one side's counted rounds, in order."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the middle half of the rounds."""
        ordered = sorted(self.seconds)
        quarter = len(ordered) // 4
        middle = ordered[quarter : len(ordered) - quarter]
        return (middle[-1] - middle[0]) / self.median_s


def interleave(sides: Mapping[str, Step], rounds: int, *, warmup: int = 1) -> dict[str, Timings]:
    """Run step 0, 1, ... of every side; returns the seconds of `rounds` rounds after `warmup` uncounted ones."""
    _keep_freed_memory()
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what lives now outlives the measurement; collecting between steps need not walk it each time
    try:
        with flushing(True):
            for step in range(warmup + rounds):
                turn = step % len(names)
                for name in names[turn:] + names[:turn]:
                    elapsed = _timed(sides[name], step)
                    if step >= warmup:
                        seconds[name].append(elapsed)
    finally:
        gc.unfreeze()
    return {name: Timings(tuple(values)) for name, values in seconds.items()}


def ratio(slow: Timings, fast: Timings) -> float:
    """How many times faster: the median over rounds of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))


def _keep_freed_memory() -> None:
    """Where glibc allocates, for the rest of the process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _timed(step: Step, index: int) -> float:
    gc.collect()
    _synchronize()
    start = time.perf_counter()
    step(index)
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
