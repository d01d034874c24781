"""What other processes took of the processors that this one may use, over a stretch of time.

Repeats that agree do not show that a machine was quiet: under a steady load they agree as well. The kernel's own
counters do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of processors so far: all there were, those that somebody or a neighbour of this virtual machine used,
    and those that this process did."""

    total_s: float
    busy_s: float
    own_s: float


def used() -> Used:
    """Until now; nothing where the system does not say."""
    process = psutil.Process()
    try:
        places = process.cpu_affinity()
    except (AttributeError, psutil.Error):  # not everywhere
        return Used(0.0, 0.0, 0.0)
    known = psutil.cpu_times(percpu=True)
    times = [known[place] for place in places if place < len(known)]
    idle_s = sum(one.idle + getattr(one, "iowait", 0.0) for one in times)
    guests_s = sum(getattr(one, "guest", 0.0) + getattr(one, "guest_nice", 0.0) for one in times)  # counted as user too
    total_s = sum(map(sum, times)) - guests_s
    own = process.cpu_times()
    return Used(total_s, total_s - idle_s, own.user + own.system)


def others_since(before: Used, now: Callable[[], Used] = used) -> float:
    """The part of the processors that others have used since then, 0 to 1."""
    after = now()
    total_s = after.total_s - before.total_s
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / total_s)) if total_s > 0 else 0.0
