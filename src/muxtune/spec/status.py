"""Where a job stands, and the moves it may make.

queued -> running -> completed
queued, running, paused -> cancelled | failed
running <-> paused;  running -> queued (the process stopped; the job waits for the next)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from muxtune.errors import StateError


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return not _MOVES[self]

    def may_become(self, new: JobStatus) -> bool:
        return new in _MOVES[self]

    def become(self, new: JobStatus, *, job: str) -> JobStatus:
        """`new`, or StateError where the move is not legal."""
        if self.may_become(new):
            return new
        legal = ", ".join(sorted(_MOVES[self])) or "nothing, it is final"
        raise StateError(f"a {self} job cannot become {new}", where=job, hint=f"from {self}: {legal}")


_ENDED = frozenset({JobStatus.CANCELLED, JobStatus.FAILED})
_MOVES: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.QUEUED: _ENDED | {JobStatus.RUNNING, JobStatus.PAUSED},
    JobStatus.RUNNING: _ENDED | {JobStatus.PAUSED, JobStatus.QUEUED, JobStatus.COMPLETED},
    JobStatus.PAUSED: _ENDED | {JobStatus.RUNNING, JobStatus.QUEUED},
    JobStatus.COMPLETED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}
