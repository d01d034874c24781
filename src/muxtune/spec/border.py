"""The base of every spec: frozen, unknown keys refused, and every fault a ConfigError that names the key.

pydantic stays behind this file: a caller of a spec, be it a Python user, the YAML loader or the API, meets the errors
of muxtune.errors only. `where` is the dotted key within the spec (`peft.r`); who knows the file adds file and line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from muxtune.errors import ConfigError
from muxtune.spec.scalars import clip, nearest

_BOUNDS = {
    "greater_than_equal": ("ge", "should be at least"),
    "greater_than": ("gt", "should be more than"),
    "less_than_equal": ("le", "should be at most"),
    "less_than": ("lt", "should be less than"),
}


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    # pydantic calls this for nested specs too, so an error is worded by the class that knows the keys around it.
    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _config_error(cls, error) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise _config_error(cls, error) from None


def unknown_key(key: str, known: Iterable[str], *, also: Iterable[str] = (), where: str | None = None) -> ConfigError:
    """The error for a key that is none of `known`, naming the nearest of them and of the aliases `also`."""
    known = tuple(known)
    near = nearest(key, (*known, *also))
    hint = f"did you mean {near!r}?" if near else "known keys: " + ", ".join(known)
    return ConfigError(f"unknown key {key!r}", where=where, hint=hint)


def _config_error(cls: type[Spec], error: ValidationError) -> ConfigError:
    errors = error.errors(include_url=False)
    # A misspelt key is often also a missing one; the misspelling is what to mend.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = ".".join(str(part) for part in first["loc"])
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        where = ".".join(part for part in (place, inner.where) if part)
        return ConfigError(inner.message, where=where or None, hint=inner.hint)
    if first["type"] == "extra_forbidden":
        return unknown_key(str(first["loc"][-1]), cls.model_fields, where=place)
    return ConfigError(_message(first), where=place or None)


def _message(error: ErrorDetails) -> str:
    kind, ctx = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{words} {ctx[key]}, got {clip(error['input'])}"
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        return "should not be empty"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return f"{message}, got {clip(error['input'])}"
