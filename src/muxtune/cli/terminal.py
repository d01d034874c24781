"""Where output goes and in which dress: data to stdout, progress and complaints to stderr.

A stream is *fancy* - colours, a table that redraws itself - only where it is a terminal that understands this and
NO_COLOR is unset. Everywhere else not one escape sequence is written, whatever a library finds in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_WIDTH = 1000  # a pipe has no width: nothing is cut off


def is_fancy(stream: TextIO) -> bool:
    """Whether escape sequences may be written to `stream`."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def console(stream: TextIO) -> Console:
    """A rich console that prints text as it is: no markup, no emoji names, no highlighting."""
    from rich.console import Console

    fancy = is_fancy(stream)
    return Console(
        file=stream,
        force_terminal=fancy,
        no_color=not fancy,
        color_system="auto" if fancy else None,
        width=None if fancy else _PLAIN_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


def tell(text: str) -> None:
    """A line for the person at the keyboard. A closed stderr stops nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence("stderr")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def counted(number: int, noun: str) -> str:
    """ "1 job", "1,200 jobs"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def grid(*headings: str) -> Table:
    """An empty table without lines; the first column is text, the others numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def printable(text: str) -> str:
    """Text of a model or a file for a terminal: its control characters as escapes, so that it cannot drive it."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def duration(seconds: float | None) -> str:
    """8 -> "8s", 200 -> "3m20s", 7500 -> "2h05m"."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def prepare_streams() -> None:
    """Characters that a stream's encoding lacks are written as escapes instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def flush_stdout() -> bool:
    """Whether all of stdout has been taken; false where its reader is gone, and then nothing more is written to it."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence("stdout")
        return False
    return True


def _silence(name: str) -> None:
    """Let the stream lead nowhere: the interpreter flushes it once more when it ends."""
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open until the process ends
    setattr(sys, name, stream)
