"""How much memory a piece of work holds at its worst, counted from torch's own allocations on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Beyond what was there before. Whatever is made once and kept belongs into a first run, by the caller."""
    with profile(profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "torch tells nothing of its allocations any more"
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # below zero for what is freed
        peak = max(peak, held)
    return peak
