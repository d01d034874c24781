"""What a set of jobs takes of the memory, and who may start beside whom.

    process + weights + adapters (with gradients and moments) + activations of the widest batch <= limit

Room is what is left of one number, which does not change while a run lasts, and not what the machine has free at a
moment: under a stated `memory_limit`, who trains when follows from the config, the data and the steps that are done.

**Who goes first** (`starting`). First come, first served, in the order of the config. Where the next in line does not
fit yet, it gets a date: the round after which, with one step a round for each of those that run, enough of them have
ended. A later job may go before it that leaves this date as it is: it fits now, and it has ended by then or fits beside
the next in line, too. So nobody waits longer for those who come after it, and memory that the next in line cannot use
yet is used (backfilling: Lifka, The ANL/IBM SP scheduling system, 1995). Where a task ends before its last step, the
next in line only comes sooner.

Cost: comparisons, jobs squared at the worst, only when one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from muxtune.engine.engine import DEFAULT_FUSE_TOKENS
from muxtune.models.memory import Footprint


class Size(Protocol):
    """What of a job counts here (`muxtune.engine.admission.JobSize`)."""

    @property
    def longest(self) -> int: ...
    @property
    def widest(self) -> int: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def rounds(self) -> int:
        """Optimizer steps that it has left."""
        ...


_Size = TypeVar("_Size", bound=Size)
Fits = Callable[[Sequence[_Size]], bool]


@dataclass(frozen=True, slots=True)
class Room:
    """A limit, the process as it was before the base model was loaded, and the model."""

    model: Footprint
    limit_bytes: int
    process_bytes: int

    def left_bytes(self, sizes: Sequence[Size]) -> int:
        """For activations, beside the process, the base model and these jobs; may be below zero."""
        held = sum(size.held_bytes for size in sizes)
        return self.limit_bytes - self.process_bytes - self.model.weights_bytes - held

    def fits(self, sizes: Sequence[Size]) -> bool:
        """Whether they may train together: in a pass of the widest batch of any, at least."""
        return max((size.activation_bytes for size in sizes), default=0) <= self.left_bytes(sizes)

    def fuse_tokens(self, sizes: Sequence[Size]) -> int:
        """Rows that they may bring together; 0 where there are none of them."""
        if not sizes:
            return 0
        longest = max(size.longest for size in sizes)
        within = self.model.rows_within(self.left_bytes(sizes), longest)
        return max(*(size.widest for size in sizes), min(DEFAULT_FUSE_TOKENS, within))

    def peak_bytes(self, sizes: Sequence[Size]) -> int:
        """Of all of them at work, the process and the base model included."""
        held = self.limit_bytes - self.left_bytes(sizes)
        if not sizes:
            return held
        rows = min(self.fuse_tokens(sizes), sum(size.widest for size in sizes))
        return held + self.model.activation_bytes(rows, max(size.longest for size in sizes))


def starting(running: Sequence[_Size], waiting: Sequence[_Size], fits: Fits[_Size]) -> list[_Size]:
    """Those of the waiting, who stand in line in this order, that start now beside the running.

    Each of them must fit alone, and with any that fit, fewer of them do.
    """
    beside, taken = list(running), list[_Size]()
    head: _Size | None = None
    date, then = 0, list[_Size]()
    for one in waiting:
        if not fits([*beside, one]):
            if head is None:
                head = one
                date, then = _date(beside, head, fits)
            continue
        if head is not None and one.rounds > date:
            if not fits([*then, head, one]):
                continue
            then.append(one)
        beside.append(one)
        taken.append(one)
    return taken


def _date(running: Sequence[_Size], head: _Size, fits: Fits[_Size]) -> tuple[int, list[_Size]]:
    """After how many rounds the next in line fits, and who of the others is still there."""
    left, date = sorted(running, key=lambda one: one.rounds), 0
    while not fits([*left, head]):
        date = left.pop(0).rounds
    return date, [one for one in left if one.rounds > date]
