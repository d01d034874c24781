"""What an action that raises leaves behind: the record of all that ran before it.

A pass can raise for reasons that no check foresees: memory, a driver, a fault in an adapter's code. What was applied
before it has been applied, so the exception carries its record; whoever runs rounds goes on from there
(`muxtune.engine.rounds`). It is no MuxTuneError: a user who meets it has met a fault of the program or the machine.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from muxtune.plan.types import RoundRecord, tasks_of

_CLIP = 300  # characters
# What torch's allocators say in a plain RuntimeError: the CPU's on Linux and on Windows, and CUDA's libraries.
_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "_ALLOC_FAILED")


class PassError(RuntimeError):
    """An action raised `__cause__`, or one of `together` that ran at once. `record` says what ran before them; `tasks`
    took part."""

    def __init__(self, message: str, record: RoundRecord, together: int = 1) -> None:
        super().__init__(message)
        self.record = record
        self.together = together
        ran = len(record.actions)
        running = record.schedule.actions[ran : ran + together]
        assert running, "nothing was left to raise"
        self.tasks = tuple(task for action in running for task in tasks_of(action) if task is not None)

    def __reduce__(self) -> tuple[object, ...]:
        return (PassError, (str(self), self.record, self.together))


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as text, so that nothing it held on to is kept: its class and first line, and where it came from.
    `memory`: it was for want of that."""

    message: str
    traceback: str
    memory: bool = False


def raised_text(error: BaseException) -> Raised:
    return Raised(brief(error), "".join(traceback.format_exception(error)), of_memory(error))


def of_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_MEMORY)


def brief(error: BaseException) -> str:
    """Class and first line, cut: what an event or a log may say of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:_CLIP] if lines else type(error).__name__
