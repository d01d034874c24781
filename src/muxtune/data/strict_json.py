"""JSON of an untrusted line, without the traps of a lenient parser.

Refused, each with a code: duplicate keys (parsers disagree on which one counts), NaN and Infinity, numbers too large
for a double or absurdly long (Python's own limit raises in the middle of a parse), nesting beyond 64 levels, lone
surrogates (they cannot be encoded, so they would fail far from here, in the tokenizer).

Built on the standard library's C scanner through its hooks; the walk that follows costs some microseconds a line.
"""

from __future__ import annotations

import json
import math
from typing import NoReturn

from muxtune.data.problems import LineError, quoted

MAX_DEPTH = 64
MAX_DIGITS = 100


def parse(text: str) -> object:
    """The value of `text`, which must hold one JSON value and nothing else. Raises LineError."""
    try:
        value: object = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _not_json(error) from None
    except RecursionError:
        raise _too_deep() from None
    _check(value)
    return value


def parse_at(text: str, start: int) -> tuple[object, int]:
    """The value that begins at `start`, and where it ends. Raises LineError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _not_json(error, f"line {error.lineno}, ") from None
    except RecursionError:
        raise _too_deep() from None
    _check(value)
    return value, end


def type_name(value: object) -> str:
    """What JSON calls the type of `value`."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _check(value: object) -> None:
    """Depth and surrogates, iteratively: the value may be nested as deep as the scanner allowed."""
    stack = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, str):
            _check_text(node)
        elif isinstance(node, dict | list):
            if depth > MAX_DEPTH:
                raise _too_deep()
            if isinstance(node, dict):
                for key in node:
                    _check_text(key)
            children = node.values() if isinstance(node, dict) else node
            stack.extend((child, depth + 1) for child in children)


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise LineError("lone_surrogate", "a string holds half of a surrogate pair (\\ud800-\\udfff)") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise LineError("duplicate_key", f"the key {quoted(key)} occurs twice in one object")
        result[key] = value
    return result


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise LineError("number_too_large", f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise LineError("number_too_large", "a number does not fit a double")
    return value


def _constant(name: str) -> NoReturn:
    raise LineError("not_finite", f"{name} is not JSON")


def _not_json(error: json.JSONDecodeError, line: str = "") -> LineError:
    return LineError("not_json", f"not JSON: {error.msg} ({line}column {error.colno})")


def _too_deep() -> LineError:
    return LineError("too_deep", f"nested deeper than {MAX_DEPTH} levels")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=True
)
