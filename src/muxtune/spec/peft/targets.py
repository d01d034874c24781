"""How a spec names the modules it adapts: `all-linear`, or literal names and suffixes; never a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator

from muxtune.errors import ConfigError
from muxtune.spec.peft.base import Place
from muxtune.spec.scalars import clip

ALL_LINEAR = "all-linear"

_MODULE_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def _read_targets(value: object) -> object:
    """`all-linear`, or module names as a list or with commas: literal suffixes or full names, never patterns."""
    if isinstance(value, str):
        if value.strip().lower() in ("all", ALL_LINEAR):
            return ALL_LINEAR
        value = value.split(",")
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"should be {ALL_LINEAR!r} or a list of module names, got {clip(value)}")
    return tuple(dict.fromkeys(_read_module_name(name) for name in value))


def _read_module_name(value: object) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if not _MODULE_NAME.fullmatch(name) or len(name) > 256:
        raise ConfigError(
            f"should be the name of a module, got {clip(value)}",
            hint="a literal suffix such as q_proj or a full name; patterns are not read",
        )
    return name


Targets = Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_read_targets)]


def targeted(targets: str | tuple[str, ...], places: Iterable[Place]) -> list[Place]:
    """The linears among `places` that `targets` names (peft's rule: a whole path, or a suffix at a dot)."""
    linear = [place for place in places if place.kind == "linear"]
    if targets == ALL_LINEAR:
        return linear
    return [place for place in linear if any(_names(target, place) for target in targets)]


def unmatched(targets: str | tuple[str, ...], places: Iterable[Place]) -> tuple[str, ...]:
    """The targets that name no linear among `places`."""
    linear = targeted(ALL_LINEAR, places)
    wanted = () if targets == ALL_LINEAR else targets
    return tuple(target for target in wanted if not any(_names(target, place) for place in linear))


def _names(target: str, place: Place) -> bool:
    return place.name == target or place.name.endswith(f".{target}")
