"""Numbers too small to be normal taken as zero in a pass, by all threads that compute or by none.

Softmax over long rows and the gradients of adapters that have hardly begun are full of such numbers, and a CPU takes
many times as long for each (docs/log.md has a load that took two to eight times as long). They are far below what any
sum here keeps.

The mode belongs to a thread, and a new thread has that of the one which began it. So intra-op threads are begun in it,
when a backbone is loaded, and the calling thread is in it while it runs passes (`flushing`): what else it computes is
its own affair. Intra-op threads that ran before stay as they were. A row must not depend on the thread it falls to, so
then none is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ROWS_A_THREAD = 1 << 16  # twice what torch gives a thread at least


def threads_flush() -> bool:
    """Begin the intra-op threads so, if they have not begun; whether all are. This thread is left as it was."""
    with flushing(True):
        return _flush(torch.get_num_threads() * _ROWS_A_THREAD)


@contextmanager
def flushing(wanted: bool) -> Iterator[None]:
    """Within, this thread takes denormal numbers as zero, if `wanted`, where the CPU can."""
    changed = wanted and not _flush(1) and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changed:
            torch.set_flush_denormal(False)


def _flush(count: int) -> bool:
    """Whether so many denormal numbers, times one, are all zero."""
    smallest: Tensor = torch.ones(count, dtype=torch.int32).view(torch.float32)
    return not bool((smallest * 1.0).view(torch.int32).any())
