"""What an action that raises leaves behind: the record of all that ran before it.

A pass can raise for reasons that no check foresees: memory, a driver, a fault in an adapter's code. What was applied
before it has been applied, so the exception carries its record; whoever runs rounds goes on from there
(`muxtune.engine.rounds`). It is no MuxTuneError: a user who meets it has met a fault of the program or the machine.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from muxtune.plan.types import RoundRecord, tasks_of

_CLIP = 300  # characters


class PassError(RuntimeError):
    """An action raised `__cause__`. `record` says what ran before it; `tasks` took part in it."""

    def __init__(self, message: str, record: RoundRecord) -> None:
        super().__init__(message)
        self.record = record
        assert record.raised is not None
        self.tasks = tuple(task for task in tasks_of(record.raised) if task is not None)

    def __reduce__(self) -> tuple[object, ...]:
        return (PassError, (str(self), self.record))


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as text, so that nothing it held on to is kept: its class and first line, and where it came from."""

    message: str
    traceback: str


def raised_text(error: BaseException) -> Raised:
    return Raised(brief(error), "".join(traceback.format_exception(error)))


def brief(error: BaseException) -> str:
    """Class and first line, cut: what an event or a log may say of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:_CLIP] if lines else type(error).__name__
