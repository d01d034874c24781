"""Pieces of a pass: a generator that computes, says what it must wait for, and goes on when it is resumed.

Who resumes decides the order of work. `run_plain` waits at once, which is the twin of everything that overlaps; the
order of several pieces is `muxtune.parallel.orchestrate`'s.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Waiting(Protocol):
    """A collective, send or receive in flight."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Raises RankError where another rank is lost."""
        ...


Steps = Generator[Waiting, None, T]  # computes, yields what it must wait for before it can go on, returns its result


def run_plain(steps: Steps[T]) -> T:
    """The result of a piece that is waited for wherever it waits."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as done:
        result: T = done.value
        return result
