"""Keys and values of sequences being decoded: one growing buffer a (layer, slot).

A slot is one sequence. Buffers double when they are full, so a sequence of n tokens costs O(n) copies in all; `drop`
frees a finished sequence at once. Forward only: nothing here takes part in autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._used: dict[tuple[int, int], int] = {}

    @property
    def slots(self) -> set[int]:
        """The sequences it holds something of."""
        return {slot for _, slot in self._buffers}

    def extend(self, layer: int, slot: int, key_1GSK: Tensor, value_1GSK: Tensor) -> tuple[Tensor, Tensor]:
        """Append S positions to a slot; returns views of all N positions it now holds, [1, G, N, K] each."""
        place = (layer, slot)
        start = self._used.get(place, 0)
        stop = start + key_1GSK.shape[2]
        keys, values = self._reserve(place, key_1GSK, value_1GSK, stop)
        keys[:, :, start:stop] = key_1GSK
        values[:, :, start:stop] = value_1GSK
        self._used[place] = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def drop(self, slot: int) -> None:
        for place in [place for place in self._buffers if place[1] == slot]:
            del self._buffers[place], self._used[place]

    def _reserve(self, place: tuple[int, int], key: Tensor, value: Tensor, needed: int) -> tuple[Tensor, Tensor]:
        held = self._buffers.get(place)
        if held is not None and held[0].shape[2] >= needed:
            return held
        capacity = max(needed, 64 if held is None else 2 * held[0].shape[2])
        grown = (_empty(key, capacity), _empty(value, capacity))
        if held is not None:
            used = self._used[place]
            for new, old in zip(grown, held, strict=True):
                new[:, :, :used] = old[:, :, :used]
        self._buffers[place] = grown
        return grown


def _empty(like_1GSK: Tensor, capacity: int) -> Tensor:
    batch, heads, _, head_dim = like_1GSK.shape
    return torch.empty(batch, heads, capacity, head_dim, dtype=like_1GSK.dtype, device=like_1GSK.device)
