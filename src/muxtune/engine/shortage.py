"""What is said where memory does not suffice: what is needed, what there is, and what would do.

The boundary: words, from the numbers of `muxtune.engine.admission`, which decides. A number that the user is to write
is one that was tried, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from muxtune.errors import ConfigError
from muxtune.models.memory import Footprint

if TYPE_CHECKING:
    from muxtune.engine.admission import Admission, JobSize

_SHOWN = 3  # names of jobs in one sentence


def too_large(
    size: JobSize, model: Footprint, sizes: Sequence[JobSize], limit_bytes: int, process_bytes: int
) -> ConfigError:
    """What is said of one job beside `sizes`, itself among them; what to do is added when that is known."""
    states = sum(one.held_bytes for one in sizes)
    left = limit_bytes - process_bytes - model.weights_bytes - states
    return ConfigError(
        f"does not fit into memory: its longest batch ({size.widest:,} tokens at once) needs about "
        f"{size_text(size.activation_bytes)}{' with recomputation' * model.recompute}; "
        f"of {size_text(limit_bytes)} there are {size_text(max(0, left))} left beside the process "
        f"({size_text(process_bytes)}), the base model ({size_text(model.weights_bytes)}) and "
        f"{len(sizes)} adapter{'s' * (len(sizes) != 1)} ({size_text(states)})",
        where=f"jobs.{size.job.name}",
    )


def all_too_large(found: Admission) -> ConfigError:
    """What is said of several jobs, once."""
    short, everyone = found.short, (*found.sizes, *found.short)
    names = ", ".join(size.job.name for size in short[:_SHOWN]) + f" and {len(short) - _SHOWN} more" * (
        len(short) > _SHOWN
    )
    left = max(0, found.limit_bytes - found.process_bytes - found.model.weights_bytes)
    adapters, batch = sum(one.held_bytes for one in everyone), max(one.activation_bytes for one in everyone)
    return ConfigError(
        f"{len(short)} of {len(everyone)} jobs do not fit into memory ({names}): of {size_text(found.limit_bytes)} "
        f"there are {size_text(left)} left beside the process ({size_text(found.process_bytes)}) and the base model "
        f"({size_text(found.model.weights_bytes)}), for all adapters ({size_text(adapters)}) and "
        f"the longest batch of any ({size_text(batch)})",
        where="jobs",
        hint=what_to_do(found),
    )


def what_to_do(found: Admission) -> str:
    """Shorter sequences and fewer jobs help only where there is some memory beside the process and the base model."""
    jobs = len(found.sizes) + len(found.short)
    least = (
        f"memory_limit: {_limit_text(found.least_bytes)} is the least that works{f' for all {jobs} jobs' * (jobs > 1)}"
    )
    left = found.limit_bytes - found.process_bytes - found.model.weights_bytes
    if left <= min(size.held_bytes for size in found.short):
        return f"give it more memory: {least}"
    return f"lower max_length{' or the number of jobs' * (jobs > 1)}, or give it more memory: {least}"


def rounded_up(size_bytes: int) -> int:
    """To two or three digits."""
    step: int = 10 ** max(6, len(str(size_bytes)) - 2)
    return -(-size_bytes // step) * step


def _limit_text(size_bytes: int) -> str:
    """A number of `rounded_up` as the config takes it."""
    if size_bytes < 10**9:
        return f"{size_bytes // 10**6}MB"
    return f"{size_bytes / 10**9:.1f}GB"


def size_text(size_bytes: int) -> str:
    """1536000 -> "1.5 MB": three digits at most before the point, decimal units."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
