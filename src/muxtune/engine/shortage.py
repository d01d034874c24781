"""What is said where memory does not suffice: what is needed, what there is, and what would do.

The boundary: words, from the numbers of `muxtune.engine.admission`, which decides. A number that the user is to write
is one that was tried, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from muxtune.errors import ConfigError
from muxtune.plan.memory import size_text as size_text

if TYPE_CHECKING:
    from muxtune.engine.admission import Admission, JobSize
    from muxtune.engine.room import Room

_SHOWN = 3  # names of jobs in one sentence


def too_large(size: JobSize, room: Room) -> ConfigError:
    """What is said of one job that has no room even alone; what to do is added when that is known."""
    return ConfigError(
        f"does not fit into memory: its longest batch ({size.widest:,} tokens at once) needs about "
        f"{size_text(size.activation_bytes)}{' with recomputation' * room.model.recompute}; {_left(room, [size])}",
        where=f"jobs.{size.job.name}",
    )


def waits(size: JobSize, running: Sequence[JobSize], before: Sequence[JobSize], room: Room) -> str:
    """What is said of one job that has no room beside those that start, `before` which others wait."""
    batch = max(one.activation_bytes for one in (*running, size))
    line = f"; {before[0].job.name} is next in line" if before else ""
    if room.fits([*running, size]):
        return f"waits for its turn: it would keep {before[0].job.name}, which comes before it, from its own"
    return (
        f"waits for memory: its adapter ({size_text(size.held_bytes)}) and a batch as wide as it or the others have "
        f"({size_text(batch)}) need about {size_text(size.held_bytes + batch)}; {_left(room, running)}{line}"
    )


def _left(room: Room, sizes: Sequence[JobSize]) -> str:
    return (
        f"of {size_text(room.limit_bytes)} there are {size_text(max(0, room.left_bytes(sizes)))} left beside the "
        f"process ({size_text(room.process_bytes)}), the base model ({size_text(room.model.weights_bytes)}) and "
        f"{len(sizes)} adapter{'s' * (len(sizes) != 1)} ({size_text(sum(one.held_bytes for one in sizes))})"
    )


def all_too_large(found: Admission) -> ConfigError:
    """What is said of several jobs, once."""
    short, jobs = found.short, len(found.sizes) + len(found.waiting) + len(found.short)
    names = ", ".join(size.job.name for size in short[:_SHOWN]) + f" and {len(short) - _SHOWN} more" * (
        len(short) > _SHOWN
    )
    least = min(short, key=lambda size: size.alone_bytes)
    return ConfigError(
        f"{len(short)} of {jobs} jobs do not fit into memory, not even alone ({names}): of "
        f"{size_text(found.limit_bytes)} there are {size_text(max(0, found.room.left_bytes([])))} left beside the "
        f"process ({size_text(found.process_bytes)}) and the base model ({size_text(found.model.weights_bytes)}); "
        f"the least that one of them needs is {size_text(least.alone_bytes)}, for its adapter "
        f"({size_text(least.held_bytes)}) and its longest batch ({size_text(least.activation_bytes)})",
        where="jobs",
        hint=what_to_do(found),
    )


def what_to_do(found: Admission) -> str:
    """Shorter sequences help only where there is some memory beside the process, the base model and an adapter."""
    jobs = len(found.sizes) + len(found.waiting) + len(found.short)
    least = (
        f"memory_limit: {_limit_text(found.least_bytes)} is the least that works{f' for all {jobs} jobs' * (jobs > 1)}"
    )
    if found.room.left_bytes([]) <= min(size.held_bytes for size in found.short):
        return f"give it more memory: {least}"
    return f"lower max_length, or give it more memory: {least}"


def rounded_up(size_bytes: int) -> int:
    """To two or three digits."""
    step: int = 10 ** max(6, len(str(size_bytes)) - 2)
    return -(-size_bytes // step) * step


def _limit_text(size_bytes: int) -> str:
    """A number of `rounded_up` as the config takes it."""
    if size_bytes < 10**9:
        return f"{size_bytes // 10**6}MB"
    return f"{size_bytes / 10**9:.1f}GB"
