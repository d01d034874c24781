"""Names of jobs: safe as folder names on every system, and unique.

A name is joined to the output folder, so its letters are an allow-list (no separator, no leading dot, no space) and
the device names of Windows are refused with any extension. Uniqueness ignores case, as some file systems do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from muxtune.errors import ConfigError
from muxtune.spec.scalars import clip

MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10))}


def read_name(value: object) -> str:
    """A job's name, or ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"should be a name, got {clip(value)}")
    if not _NAME.fullmatch(value) or value.endswith("."):
        raise ConfigError(
            f"{clip(value)} is not safe as the name of a folder",
            hint="letters, digits, '.', '_' and '-', starting with a letter or digit, not ending with '.'",
        )
    if len(value) > MAX_NAME:
        raise ConfigError(f"{clip(value)} is longer than {MAX_NAME} characters")
    if value.split(".")[0].lower() in _RESERVED:
        raise ConfigError(f"{value!r} is the name of a device on Windows", hint="choose another name")
    return value


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that another before it equals but for case."""
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            return name
        seen.add(name.casefold())
    return None
