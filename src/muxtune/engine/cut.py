"""The cut sequences of a schedule: which are under way, where their keys and values are, and what passes have kept.

A sequence gets a slot of the `KVCarry` with its first piece and gives it back with its last. Which piece may come when
is checked before a schedule runs (`muxtune.plan.legal`); a schedule that is broken off leaves nothing behind.
"""

from __future__ import annotations

from itertools import count

from torch import Tensor

from muxtune.models.kv_carry import KVCarry
from muxtune.plan.types import MicroBatch, SequenceRef, WorkItem


class CutSequences:
    def __init__(self) -> None:
        self.carry = KVCarry()
        self._slots: dict[tuple[str | None, str, int], int] = {}
        self._numbers = count()
        self._kept: dict[object, Tensor] = {}

    def slot(self, item: WorkItem, ref: SequenceRef, lead: int) -> int | None:
        """Where the next pass of a piece finds what went before it; None for a whole sequence.

        `lead`: positions that the adapter puts before the sequence; they come with its first piece.
        """
        if not ref.cut:
            return None
        key = (item.task, item.source, ref.index)
        if key not in self._slots:
            self._slots[key] = next(self._numbers)
            self.carry.open(self._slots[key], lead + ref.whole, learned=lead > 0)
        self.carry.seek(self._slots[key], lead + ref.start if ref.start else 0)
        return self._slots[key]

    def ran(self, item: WorkItem) -> None:
        """Give back the slots of the sequences whose last pass this was."""
        for ref in item.sequences:
            last = (
                ref.start == 0
                if item.kind == "train"
                else item.kind not in ("carry", "score") and ref.stop == ref.whole
            )
            if ref.cut and last:
                self.carry.close(self._slots.pop((item.task, item.source, ref.index)))

    def keep(self, batch: MicroBatch, hidden_TD: Tensor) -> None:
        """Hold on to a pass's rows and, by their graph, to its activations."""
        self._kept[batch.pieces] = hidden_TD

    def take(self, batch: MicroBatch) -> Tensor:
        """What a pass of the same pieces kept; it is the caller's from here on."""
        return self._kept.pop(batch.pieces)

    def drop(self) -> None:
        """Give back all."""
        self._kept.clear()
        for slot in self._slots.values():
            self.carry.close(slot)
        self._slots.clear()
