"""Where adapters of one layout lie: their flat buffers side by side, at equal distances.

A matrix of K such adapters is then one strided view, with no copy to make or to keep true, and so a batched product can
read all of them and write all their gradients (`muxtune.peft.pair_stack`). An adapter is moved in when its task is
attached, and its place is free again once nothing holds its parameters.

Cost: address space. A slab has room for up to `MOST` adapters or `SLAB_BYTES`, but on a CPU the system gives memory to
a place when it is first written, so an empty place costs none. Elsewhere it would: there nothing is moved. A place that
is free again keeps its memory for the next adapter of its layout, until `trim` gives it back.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from muxtune.peft.base import Adapter, Slot
from muxtune.peft.pages import zeros
from muxtune.peft.parameters import FlatParameters

MOST = 32
SLAB_BYTES = 256 * 2**20  # of values; as much again of gradients

_Layout = tuple[tuple[tuple[str, tuple[int, ...]], ...], torch.dtype]


class Slab:
    """Room for `capacity` adapters like `parameters`."""

    def __init__(self, like: FlatParameters) -> None:
        size = like.values.numel()
        self.distance = size  # elements from one adapter to the next
        capacity = max(1, min(MOST, SLAB_BYTES // max(1, size * like.values.element_size())))
        dtype, device = like.values.dtype, like.values.device
        self._values, values = zeros(capacity, size, dtype=dtype, device=device)
        self._gradients, gradients = zeros(capacity, size, dtype=dtype, device=device)
        self._pages = [pages for pages in (values, gradients) if pages is not None and hasattr(mmap, "MADV_DONTNEED")]
        self._free = set(range(capacity))
        self._written: set[int] = set()

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def empty(self) -> bool:
        return len(self._free) == len(self._values)

    def take(self, parameters: FlatParameters) -> int:
        """Move an adapter that has not begun to train in, at the first free place; which that is."""
        place = min(self._free)
        self._free.discard(place)
        if place in self._written:
            self._gradients[place].zero_()
        self._written.add(place)
        parameters.move(self._values[place], self._gradients[place])
        weakref.finalize(parameters, self._free.add, place).atexit = False
        return place

    def trim(self) -> None:
        """Give the memory of free places back to the system: their whole pages. What they hold is lost."""
        size_bytes = self.distance * self._values.element_size()
        for place in self._free:
            start = -(-place * size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            length = ((place + 1) * size_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
            for pages in self._pages if length > 0 else ():
                pages.madvise(mmap.MADV_DONTNEED, start, length)


class Slabs:
    """The slabs of one engine."""

    def __init__(self) -> None:
        self._slabs: dict[_Layout, list[Slab]] = {}

    def take(self, adapter: Adapter) -> None:
        """Move an adapter that can be grouped beside its kin. Any other stays where it is."""
        parameters = adapter.parameters
        if not adapter.movable or parameters.values.device.type != "cpu":
            return
        layout = (tuple((name, tuple(view.shape)) for name, view in parameters.views.items()), parameters.values.dtype)
        slabs = [slab for slab in self._slabs.get(layout, []) if not slab.empty]
        found = next((slab for slab in slabs if not slab.full), None)
        if found is None:
            found = Slab(parameters)
            slabs.append(found)
        self._slabs[layout] = slabs
        adapter.moved(Slot(found, found.take(parameters), found.distance))

    def trim(self) -> None:
        """As `Slab.trim`, of all of them."""
        for slabs in self._slabs.values():
            for slab in slabs:
                slab.trim()
