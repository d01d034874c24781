"""Numbers too small to be normal taken as zero, by all threads that compute or by none.

Softmax over long rows and the gradients of adapters that have hardly begun are full of such numbers, and a CPU takes
many times as long for each (docs/log.md has a load that took two to eight times as long). They are far below what any
sum here keeps. The mode belongs to a thread, and a new thread has that of the one which began it: intra-op threads
that ran before this was asked stay as they were. A row must not depend on the thread it falls to, so then none does.
"""

from __future__ import annotations

import torch

_ROWS_A_THREAD = 1 << 16  # twice what torch gives a thread at least


def flush_denormals() -> bool:
    """Ask for it, for this thread and those it begins from here on; whether it holds, else nothing has changed."""
    if not torch.set_flush_denormal(True):
        return False
    if _all_flush():
        return True
    torch.set_flush_denormal(False)
    return False


def _all_flush() -> bool:
    smallest = torch.ones(torch.get_num_threads() * _ROWS_A_THREAD, dtype=torch.int32).view(torch.float32)
    return not bool((smallest * 1.0).view(torch.int32).any())
