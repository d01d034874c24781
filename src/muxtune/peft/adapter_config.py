"""What the `adapter_config.json` of every PEFT type shares, as a stranger may have written it.

The boundary: keys and literal names; which keys a type has, and what they mean, is the type's business. Every key that
would change what the tensors mean, or names code or a pattern, is refused by name; module names are literals and are
only ever compared. Source of the keys and of the matching rules: peft's `PeftConfig` and `LoraConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import TypeAlias

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError

_LITERAL = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ALL_LINEAR = "all-linear"
_OUTPUT_HEAD = "lm_head"

# A key that must be as peft leaves it when it is not used, and why another value cannot be taken.
Neutral: TypeAlias = Mapping[str, tuple[tuple[JsonValue, ...], str]]

_NEUTRAL: Neutral = {
    "task_type": ((None, "CAUSAL_LM"), "only causal language models are trained here"),
    "modules_to_save": ((None, []), "whole modules cannot be carried by an adapter here"),
    "auto_mapping": ((None,), "it names a Python class; set it to null and task_type to CAUSAL_LM"),
}
# Keys that carry information only, and those that `targeted` reads.
_HARMLESS = frozenset(
    {
        "peft_type",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)


def check_keys(
    config: Mapping[str, JsonValue], *, peft_type: str, neutral: Neutral, harmless: Collection[str], where: str
) -> None:
    """Judge every key of an untrusted config.

    Args:
        neutral: the type's own keys that must have one of the given values.
        harmless: its keys whose value the type itself reads, or that say nothing.

    Raises:
        AdapterError: it is of another type, or a key is unknown and set, or has a value that is not supported.
    """
    if config.get("peft_type") != peft_type:
        raise AdapterError(f"peft_type {clip(config.get('peft_type'))} is not {peft_type}", where=where)
    for key, value in config.items():
        bound = neutral.get(key) or _NEUTRAL.get(key)
        if bound is not None:
            allowed, reason = bound
            if not _is_one_of(value, allowed):
                raise AdapterError(f"{key} = {clip(value)} is refused: {reason}", where=where)
        elif key not in harmless and key not in _HARMLESS and not _is_one_of(value, (None, False, [], {})):
            raise AdapterError(
                f"unknown key {clip(key)} = {clip(value)}",
                where=where,
                hint="remove it if the tensors do not need it",
            )


def targeted(
    config: Mapping[str, JsonValue], attach_points: Collection[str], *, where: str, named_only: Collection[str] = ()
) -> list[str]:
    """The attach points that the config's keys select, by peft's rules restricted to literal names; those of
    `named_only` are not among all linears."""
    targets = config.get("target_modules")
    excluded = read_names(config, "exclude_modules", where) or frozenset()
    layers = _layer_numbers(config.get("layers_to_transform"), where)
    patterns = read_names(config, "layers_pattern", where)
    if targets == _ALL_LINEAR:
        apart = {_OUTPUT_HEAD, *named_only}
        chosen = [name for name in attach_points if name not in apart and name.rsplit(".", 1)[-1] != _OUTPUT_HEAD]
    else:
        names = read_names(config, "target_modules", where) or frozenset()
        chosen = [name for name in attach_points if not names.isdisjoint(suffixes(name))]
    return [
        name
        for name in chosen
        if excluded.isdisjoint(suffixes(name)) and (not layers or _layer_of(name, patterns) in layers)
    ]


def suffixes(name: str) -> Iterable[str]:
    """The last component of a module's path, the last two, and so on."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in reversed(range(len(parts))))


def _layer_of(name: str, patterns: Collection[str] | None) -> int | None:
    """The first numbered component that follows one of `patterns` (any component, where there are none)."""
    parts = name.split(".")
    for before, number in pairwise(parts):
        if number.isdigit() and (not patterns or before in patterns):
            return int(number)
    return None


def read_names(config: Mapping[str, JsonValue], key: str, where: str) -> frozenset[str] | None:
    """A list of literal module names, None where the key is not set."""
    value = config.get(key)
    if key == "layers_pattern" and isinstance(value, str):
        value = [value] if value else None
    if value is None:
        return None
    if isinstance(value, str):
        raise AdapterError(
            f"{key} = {clip(value)} is a pattern", where=where, hint="list the module names: patterns are not run"
        )
    if not isinstance(value, list) or not all(isinstance(v, str) and _LITERAL.fullmatch(v) for v in value):
        raise AdapterError(f"{key} must be a list of literal module names, not {clip(value)}", where=where)
    return frozenset(value)


def _layer_numbers(value: JsonValue, where: str) -> frozenset[int]:
    items = [value] if isinstance(value, int) and not isinstance(value, bool) else [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise AdapterError(f"layers_to_transform must be a list of integers, not {clip(value)}", where=where)
    return frozenset(items)


def read_number(
    config: Mapping[str, JsonValue], key: str, default: float, low: float, high: float, where: str
) -> float:
    """A number within bounds, `default` where the key is not set."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise AdapterError(f"{key} must be a number from {low:g} to {high:g}, not {clip(value)}", where=where)
    return float(value)


def read_flag(config: Mapping[str, JsonValue], key: str, where: str) -> bool:
    """A flag, false where the key is not set."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{key} must be true or false, not {clip(value)}", where=where)
    return value is True


def _is_one_of(value: JsonValue, allowed: Iterable[JsonValue]) -> bool:
    """Equality that does not take 0 for false or 1 for true."""
    return any(type(value) is type(item) and value == item for item in allowed)


def clip(value: JsonValue) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
