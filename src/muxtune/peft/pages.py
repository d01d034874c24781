"""Zeros that cost nothing until they are written: a CPU's memory straight from the system, page by page.

Most of what a new adapter holds is zero and stays so for a while (its gradient, half of its values), and the system
has the pages of an anonymous mapping zeroed when they are first touched anyway. They begin at a page, so alignment is
no less than the allocator's. Small tensors, and those of other devices, come from torch's allocator.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 16  # below it a mapping costs more than the zeros


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """The tensor, and the mapping it lies in, if it does, which it keeps. Raises MemoryError."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < _LEAST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device), None
    try:
        pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{count * dtype.itemsize:,} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape), pages
