"""What is said of an error, and the exit status it stands for.

Errors of `muxtune.errors` are the user's to mend: what, where and what to do, without a traceback. Anything else is a
fault of this program: its traceback goes into a file, and to the screen with --debug.
"""

from __future__ import annotations

import os
import tempfile
import traceback

from muxtune.cli.terminal import tell
from muxtune.errors import MuxTuneError

USAGE = 2


def print_error(error: MuxTuneError) -> None:
    """On stderr: `error: WHERE: WHAT`, then what to do. A data file's error brings its bad lines."""
    text = str(error)
    tail = f" ({error.hint})" if error.hint else ""
    if tail and text.endswith(tail):
        text = text.removesuffix(tail)
        tell(f"error: {text}")
        tell(f"  {error.hint}")
    else:
        tell(f"error: {text}")


def print_bug(error: Exception, *, debug: bool) -> None:
    """An error that nobody meant: where its traceback is, or the traceback itself."""
    told = "".join(traceback.format_exception(error))
    if debug:
        tell(told.rstrip())
        return
    tell(f"error: {_first_line(error)}")
    try:
        number, path = tempfile.mkstemp(prefix="muxtune-", suffix=".log")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(told)
        tell(f"  this is a fault of muxtune; its traceback is in {path}, `muxtune --debug ...` shows it")
    except OSError:
        tell("  this is a fault of muxtune; `muxtune --debug ...` shows the traceback")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
