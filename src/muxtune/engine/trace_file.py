"""The traces of an output folder: a file for each process that trained into it, in `.muxtune.trace`.

A line is written and flushed after each round, and before it where a new plan is in force. It is what ran, not what a
resume needs, so it is not made durable. A line that a kill cut off is passed over when read, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from muxtune.durable import discard, make_folder
from muxtune.plan.trace import from_line, to_line
from muxtune.plan.types import Plan, RoundRecord

FOLDER = ".muxtune.trace"
_LOG = logging.getLogger(__name__)


class TraceFile:
    """One process's trace while it is written. A disk that is full ends the trace, not the run."""

    def __init__(self, path: Path, file: TextIO | None) -> None:
        self.path = path
        self._file = file

    @classmethod
    def begin(cls, output_dir: Path) -> Self:
        """A new file in the folder of a run; named by the time, and never one that is there."""
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        path = output_dir / FOLDER / f"{now}.jsonl"
        try:
            make_folder(path.parent)
            return cls(path, open(path, "x", encoding="utf-8"))
        except OSError:
            return cls(path, None)

    def append(self, record: RoundRecord | Plan) -> None:
        """Write one line."""
        if self._file is None:
            return
        try:
            self._file.write(to_line(record))
            self._file.flush()
        except OSError:
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def discard_traces(output_dir: Path) -> None:
    """Remove what earlier processes wrote; what cannot be removed is in nobody's way."""
    with suppress(OSError):
        discard(output_dir / FOLDER)


def read_traces(output_dir: Path) -> Iterator[RoundRecord]:
    """All records of a run's folder, in the order in which they were written. Warns of lines that are none."""
    return (line for line in read_lines(output_dir) if isinstance(line, RoundRecord))


def read_lines(output_dir: Path) -> Iterator[RoundRecord | Plan]:
    """The same, and each plan before the rounds that it was in force for."""
    for path in _files(output_dir):
        lost = 0
        for line in _lines(path):
            try:
                yield from_line(line)
            except ValueError:
                lost += 1
        if lost:
            _LOG.warning(
                "%s: %d line%s cut off or damaged and passed over", path, lost, " is" if lost == 1 else "s are"
            )


def _files(output_dir: Path) -> list[Path]:
    return sorted((output_dir / FOLDER).glob("*.jsonl"))


def _lines(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from file
