"""How one value of a config is read, the same from YAML text, a flag, Python and JSON.

A YAML scalar reaches a spec as the text that stands in the file and the *field's* type reads it. So `2e-3` is a number
in every numeric field (YAML 1.1 reads a string), `007` stays a name (YAML 1.1 reads 7), and `no` is false only where
a flag is asked for. Each reader takes a value and returns the canonical one or raises ConfigError.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

from pydantic import BeforeValidator

from muxtune.errors import ConfigError

_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_MAX_NUMBER_CHARS = 64
_EXACT_FLOAT = 2**53
_MAX_INTEGER = 2**63


def clip(value: object, limit: int = 60) -> str:
    """A value as an error shows it."""
    text = value if isinstance(value, str) and parse_number(value) is not None else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def parse_number(text: str) -> int | float | None:
    """The number that `text` writes, an int where it is whole; None where it writes none."""
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("+-").isdigit():
        return int(text)
    return _whole(float(text))


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < _EXACT_FLOAT else value


def read_number(value: object) -> int | float:
    """A finite number, an int where it is whole."""
    number: int | float | None = None
    if isinstance(value, str):
        number = parse_number(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if number is None:
        raise ConfigError(f"should be a number, got {clip(value)}")
    if isinstance(number, float):
        if not math.isfinite(number):
            raise ConfigError(f"should be a finite number, got {clip(value)}")
        number = _whole(number)
    return number


def read_integer(value: object) -> int:
    """A whole number below 2^63, exactly as it is written."""
    number = read_number(value)
    if isinstance(number, float) and not number.is_integer():
        raise ConfigError(f"should be a whole number, got {clip(value)}")
    if isinstance(number, float) or abs(number) >= _MAX_INTEGER:
        hint = "its digits in full" if abs(number) < _MAX_INTEGER else f"at most {_MAX_INTEGER - 1}"
        raise ConfigError(f"is too large for a whole number: {clip(value)}", hint=hint)
    return number


def read_flag(value: object) -> bool:
    flag = _FLAGS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ConfigError(f"should be true or false, got {clip(value)}")
    return flag


def is_flag(text: str) -> bool:
    """Whether `text` writes true or false."""
    return text.lower() in _FLAGS


def read_path(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigError(f"should be the path of a file, got {clip(value)}")
    return value


def read_size(value: object) -> int:
    """Bytes: a whole number of them, or '8GB' (powers of 1000) or '8GiB' (powers of 1024)."""
    text = value.strip() if isinstance(value, str) else ""
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_NUMBER_CHARS else None
    if match is None:
        if isinstance(value, str) and parse_number(text) is None:
            raise ConfigError(
                f"should be a size, got {clip(value)}",
                hint="bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB",
            )
        return read_integer(value)
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    size = float(number) * base ** " kmgt".index(prefix.lower() or " ")
    if size >= _MAX_INTEGER:
        raise ConfigError(f"is too large for a size in bytes: {clip(value)}", hint=f"at most {_MAX_INTEGER - 1}")
    return int(size)


def read_list(value: object) -> object:
    """Where a list is wanted one item may stand alone."""
    return (value,) if isinstance(value, str | Mapping) else value


def choice(*known: str, aliases: Mapping[str, str] | None = None, later: Iterable[str] = ()) -> Callable[[object], str]:
    """A reader of one of `known` (or its alias, in any case); names in `later` are refused as not supported yet."""
    renamed = dict(aliases or {})
    not_yet = tuple(later)
    listed = ", ".join(known)

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"should be one of {listed}, got {clip(value)}")
        name = renamed.get(value.lower(), value.lower())
        if name in known:
            return name
        if name in not_yet:
            raise ConfigError(f"{value!r} is not supported yet", hint=f"supported: {listed}")
        near = nearest(value, (*known, *renamed))
        raise ConfigError(
            f"should be one of {listed}, got {clip(value)}", hint=f"did you mean {near!r}?" if near else None
        )

    return read


Number = Annotated[int | float, BeforeValidator(read_number)]
Integer = Annotated[int, BeforeValidator(read_integer)]
Flag = Annotated[bool, BeforeValidator(read_flag)]
PathText = Annotated[str, BeforeValidator(read_path)]
Size = Annotated[int, BeforeValidator(read_size)]
