"""The traces of an output folder: a file for each process that trained into it, in `.muxtune.trace`.

A line is written and flushed after each round; it is what ran, not what a resume needs, so it is not made durable and a
line that a kill cut off is passed over when read.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from muxtune.durable import make_folder
from muxtune.plan.trace import from_line, to_line
from muxtune.plan.types import RoundRecord

FOLDER = ".muxtune.trace"


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

    def append(self, record: RoundRecord) -> None:
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


def read_traces(output_dir: Path) -> Iterator[RoundRecord]:
    """All records of a run's folder, in the order in which they were written."""
    for path in sorted((output_dir / FOLDER).glob("*.jsonl")):
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    yield from_line(line)
                except ValueError:
                    continue
