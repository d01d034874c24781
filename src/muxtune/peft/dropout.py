"""Dropout masks as a pure function: no random-number state, so no split, order or co-runner can change them.

A mask bit is a counter hash of (job seed, optimizer step, example, position, attach point, channel). A backward pass or
a recomputation asks again and gets the same bits. The mixing function is the 32-bit finaliser with constants found by
C. Wellons' search for low bias ("lowbias32", public domain); 32-bit words are held in int64 tensors, whose
multiplication wraps, and masked back.

Cost: about a dozen integer passes over [t, I]; only tasks that ask for dropout pay.

Legend: t rows of one task, I channels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Two 32-bit words a row, int64 [t, 1] each."""

    low_t1: Tensor
    high_t1: Tensor

    def at(self, index_n: Tensor) -> RowKeys:
        """Those of some of the rows."""
        return RowKeys(self.low_t1[index_n], self.high_t1[index_n])


def row_keys(
    seed: int, step: int, example_t: npt.NDArray[np.int64], position_t: npt.NDArray[np.int64], device: torch.device
) -> RowKeys:
    """Keys of t rows; `step` is the number of optimizer steps done before this one."""
    with np.errstate(over="ignore"):
        key = _splitmix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF) ^ _splitmix(np.uint64(step)))
        keys_t = _splitmix(_splitmix(key ^ example_t.astype(np.uint64)) ^ position_t.astype(np.uint64))
    words = torch.from_numpy(np.stack([keys_t & np.uint64(_WORD), keys_t >> np.uint64(32)]).astype(np.int64))
    low, high = words.to(device)[..., None]
    return RowKeys(low, high)


def keep_mask(keys: RowKeys, attach_point: str, channels: int, rate: float, first: int = 0) -> Tensor:
    """bool [t, I]: true where a channel is kept; each with probability 1 - rate. `first`: of the attach point's
    channels, which the rows' first is, where they are a part of them."""
    salt = int.from_bytes(hashlib.blake2b(attach_point.encode(), digest_size=8).digest(), "little")
    channel_1I = torch.arange(first, first + channels, device=keys.low_t1.device)[None, :]
    mixed_t1 = _mix(keys.low_t1 ^ (salt & _WORD))
    bits_tI = _mix(((mixed_t1 + channel_1I * _GOLDEN) & _WORD) ^ keys.high_t1 ^ (salt >> 32))
    return bits_tI >= int(rate * 2**32)


def _mix(word: Tensor) -> Tensor:
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def _splitmix(value: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
