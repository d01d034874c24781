"""What was wrong with the lines of a data file: collected, never one at a time.

A reader that stops at the first bad line makes its user run it once per mistake. So every stage *refuses* a line
(`LineError`), a `ProblemList` keeps the first ten refusals and counts all of them by code, and one `DataFileError`
is raised at the end.

Boundary: `DataFileError.message` never holds text of an example and is safe in logs and events; `str(error)` is for the
person at the keyboard and adds a clip of each bad line.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from muxtune.errors import DataError

SHOWN = 10
CLIP_CHARS = 80


class LineError(Exception):
    """Raised while one line is read or converted. Its message names fields and types, not what they hold."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class LineProblem:
    """`line` is 1-based; `clip` is the start of the raw line, made printable."""

    line: int
    code: str
    message: str
    clip: str = ""

    def __str__(self) -> str:
        text = f"line {self.line}: {self.message} [{self.code}]"
        return f"{text}\n      {self.clip}" if self.clip else text


class DataFileError(DataError):
    """Every bad line of one file: the first ten in `problems`, all of them in `counts` (code -> lines)."""

    def __init__(self, where: str, problems: tuple[LineProblem, ...], counts: dict[str, int]) -> None:
        by_code = ", ".join(f"{code} {count}" for code, count in sorted(counts.items()))
        self.total = sum(counts.values())
        self.summary = f"{self.total} bad line{'s' if self.total > 1 else ''} ({by_code})"
        first = "; ".join(f"line {p.line}: {p.message}" for p in problems)
        super().__init__(f"{self.summary}: {first}", where=where)
        self.problems = problems
        self.counts = counts

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.summary}", *(f"  {problem}" for problem in self.problems)]
        hidden = self.total - len(self.problems)
        return "\n".join([*lines, f"  ... and {hidden} more"] if hidden else lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (DataFileError, (self.where, self.problems, self.counts))


@dataclass(slots=True)
class ProblemList:
    """Grows while a file is read; holds ten problems however bad the file is."""

    first: list[LineProblem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, line: int, code: str, message: str, clip: str = "") -> None:
        self.counts[code] += 1
        if len(self.first) < SHOWN:
            self.first.append(LineProblem(line, code, message, clip))

    def raise_if_any(self, where: str) -> None:
        if self.counts:
            ordered = sorted(self.first, key=lambda problem: problem.line)
            raise DataFileError(where, tuple(ordered), dict(self.counts))


def clip(raw: bytes | str) -> str:
    """The first characters of a line, safe to print: no control characters, so no terminal escapes."""
    text = raw[: 4 * CLIP_CHARS].decode("utf-8", "replace") if isinstance(raw, bytes) else raw[: 4 * CLIP_CHARS]
    shown = text.strip()
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else "\N{MIDDLE DOT}" for char in shown)
    return shown if len(shown) <= CLIP_CHARS else shown[: CLIP_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"


def quoted(name: object) -> str:
    """A field's or role's name for a message - but only where it looks like a name: a key may hold a user's text."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", name):
        return f"`{name}`"
    return "(not a plain name)"
