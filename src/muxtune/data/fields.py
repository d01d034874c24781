"""Typed access to the fields of a parsed line: a field of the wrong type is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from muxtune.data.problems import LineError
from muxtune.data.strict_json import parse, type_name

Json = Mapping[str, object]


def string(holder: Json, name: str, place: str = "") -> str:
    """A required string. `place` is the path to the holder, such as `messages[2].`."""
    if name not in holder:
        raise LineError("missing_field", f"field `{place}{name}` is missing")
    value = holder[name]
    if not isinstance(value, str):
        raise wrong_type(f"{place}{name}", "string", value)
    return value


def optional_string(holder: Json, name: str, place: str = "") -> str | None:
    """None where the field is absent or null (exporters write null for "not there")."""
    return None if holder.get(name) is None else string(holder, name, place)


def array(holder: Json, name: str, place: str = "") -> list[object]:
    """A required array."""
    if name not in holder:
        raise LineError("missing_field", f"field `{place}{name}` is missing")
    value = holder[name]
    if not isinstance(value, list):
        raise wrong_type(f"{place}{name}", "array", value)
    return value


def mapping(value: object, place: str) -> Json:
    """`value`, found at `place`, as the object it has to be."""
    if not isinstance(value, dict):
        raise wrong_type(place, "object", value)
    return cast("Json", value)


def tool_definitions(holder: Json) -> tuple[Json, ...]:
    """`tools`: an array of objects, or the same as JSON in a string (as columnar exports must keep it)."""
    value = holder.get("tools")
    if value is None:
        return ()
    if isinstance(value, str):
        if not value.strip():
            return ()
        value = parse(value)
    if not isinstance(value, list):
        raise wrong_type("tools", "array of objects", value)
    return tuple(mapping(tool, f"tools[{number}]") for number, tool in enumerate(value))


def wrong_type(place: str, expected: str, value: object) -> LineError:
    """The refusal of a `value` that is not what was expected."""
    return LineError("wrong_type", f"field `{place}`: expected {expected}, got {type_name(value)}")
