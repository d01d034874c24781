"""Start values that depend on the job's seed and a parameter's name alone, whatever else runs."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def generator(seed: int, name: str) -> torch.Generator:
    """One for each parameter of a job; on the CPU whatever the device, so that devices start alike."""
    return torch.Generator().manual_seed(_hash(seed, name))


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal, fp32."""
    return torch.randn(shape, generator=generator(seed, name), dtype=torch.float32)


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """[R, I] uniform in +-1/sqrt(I), what nn.Linear's Kaiming-uniform with a = sqrt 5 comes to; fp32."""
    bound = shape[1] ** -0.5
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator(seed, name))


def distinct(seed: int, name: str, count: int, below: int) -> Tensor:
    """`count` different integers from 0 to `below` - 1, ascending, every set as likely as any other.

    numpy's sampler, which needs no permutation of all of them where the count is small.
    """
    drawn = np.random.default_rng(_hash(seed, name)).choice(below, count, replace=False, shuffle=False)
    drawn.sort()
    return torch.from_numpy(drawn)


def _hash(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
