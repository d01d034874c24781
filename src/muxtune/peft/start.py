"""Start values that depend on the job's seed and a parameter's name alone, whatever else runs."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, name: str) -> torch.Generator:
    """One for each parameter of a job; on the CPU whatever the device, so that devices start alike."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal, fp32."""
    return torch.randn(shape, generator=generator(seed, name), dtype=torch.float32)
