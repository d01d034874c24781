"""Whom an engine tells what it is about to do: nobody, or the other ranks that hold parts of the same backbone.

Where a backbone is split, every pass, every attached task and every source has to be there on all ranks at once. The
engine of rank 0 announces each of its primitives before it runs it (`muxtune.engine.ranks`), and the others do the
same (`muxtune.engine.follow`). Everything else - whose turn it is, plans, data, folders - is rank 0's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from muxtune.data.types import TokenSequence
from muxtune.engine.decode import DecodeSource
from muxtune.engine.references import References
from muxtune.engine.task import Sequences, Task
from muxtune.engine.whole import Whole
from muxtune.plan.types import RoundRecord, RoundSchedule
from muxtune.spec.job import JobSpec

Source = Sequence[TokenSequence] | DecodeSource


@dataclass(slots=True)
class Outcome:
    """What the announced primitive came to, where there is a record of it."""

    record: RoundRecord | None = None


Announced = AbstractContextManager[Outcome]


class Followers(Protocol):
    """Each of these is entered before the primitive runs, and left after it: then all ranks agree on what it came to.

    They raise RankError where a rank is lost, or came to something else than the others.
    """

    def attaching(self, job: JobSpec, data: Sequences, chunk_tokens: int) -> Announced: ...
    def detaching(self, name: str) -> Announced: ...
    def trimming(self) -> Announced: ...
    def lending(self, sources: Mapping[str, Source]) -> Announced: ...
    def returning(self, names: Sequence[str]) -> Announced: ...
    def executing(self, schedule: RoundSchedule, sources: Mapping[str, Source], known: References) -> Announced: ...
    def whole(self, task: Task) -> Whole:
        """All of a task that is attached on all ranks."""
        ...


class Nobody:
    """The followers of an engine that has all of its backbone."""

    def attaching(self, job: JobSpec, data: Sequences, chunk_tokens: int) -> Announced:
        return nullcontext(Outcome())

    def detaching(self, name: str) -> Announced:
        return nullcontext(Outcome())

    def trimming(self) -> Announced:
        return nullcontext(Outcome())

    def lending(self, sources: Mapping[str, Source]) -> Announced:
        return nullcontext(Outcome())

    def returning(self, names: Sequence[str]) -> Announced:
        return nullcontext(Outcome())

    def executing(self, schedule: RoundSchedule, sources: Mapping[str, Source], known: References) -> Announced:
        return nullcontext(Outcome())

    def whole(self, task: Task) -> Whole:
        return task.whole
