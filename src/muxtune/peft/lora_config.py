"""A LoRA's `adapter_config.json`, as a stranger may have written it.

The boundary: the config alone; what it says about tensors is compared with them in `convert.py`. Every key that would
change what the tensors mean, or names code or a pattern, is refused by name; module names are literals and are only
ever compared. Source of the keys and of the matching rules: peft's `LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError

MAX_RANK = 1024
_LITERAL = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ALL_LINEAR = "all-linear"
_OUTPUT_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LoraFormat:
    """The numbers of a LoRA that its tensors do not hold.

    `fan_in_fan_out`: the base keeps its weights [in, out], as GPT-2's Conv1D does; the tensors are the same either way.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    use_rslora: bool = False
    fan_in_fan_out: bool = False

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


# Keys that must be as peft leaves them when they are not used, and why another value cannot be taken.
_NEUTRAL: Mapping[str, tuple[tuple[JsonValue, ...], str]] = {
    "task_type": ((None, "CAUSAL_LM"), "only causal language models are trained here"),
    "bias": (("none",), "trained biases are not LoRA weights"),
    "lora_bias": ((None, False), "a bias on lora_B is not supported"),
    "use_dora": ((None, False), "DoRA is not supported yet"),
    "modules_to_save": ((None, []), "whole modules cannot be carried by an adapter here"),
    "init_lora_weights": (
        (None, True, False, "gaussian", "orthogonal"),
        "this initialisation may have changed the base model's own weights; convert it to plain LoRA with peft",
    ),
    "auto_mapping": ((None,), "it names a Python class; set it to null and task_type to CAUSAL_LM"),
    "layer_replication": ((None, []), "the backbone's layers are not copied"),
    "rank_pattern": ((None, {}), "one rank for all modules is needed"),
    "alpha_pattern": ((None, {}), "one alpha for all modules is needed"),
}
# Keys that carry information only, or numbers that are read below, or defaults of features that another key turns on.
_HARMLESS = frozenset(
    {
        "peft_type",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "fan_in_fan_out",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "qalora_group_size",
    }
)


def parse_lora_config(config: Mapping[str, JsonValue], *, where: str, max_rank: int = MAX_RANK) -> LoraFormat:
    """The format that an untrusted `adapter_config.json` describes.

    Raises:
        AdapterError: a key is unknown and set, or has a value that is not supported; it is named.
    """
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {config.get('peft_type')!r} is not supported yet", where=where, hint="use LORA")
    for key, value in config.items():
        if key in _NEUTRAL:
            allowed, reason = _NEUTRAL[key]
            if not _is_one_of(value, allowed):
                raise AdapterError(f"{key} = {clip(value)} is refused: {reason}", where=where)
        elif key not in _HARMLESS and not _is_one_of(value, (None, False, [], {})):
            raise AdapterError(
                f"unknown key {clip(key)} = {clip(value)}",
                where=where,
                hint="remove it if the tensors do not need it",
            )
    return LoraFormat(
        r=_rank(config.get("r"), max_rank, where),
        lora_alpha=_number(config, "lora_alpha", 8.0, 0.0, 1e6, where),
        lora_dropout=_number(config, "lora_dropout", 0.0, 0.0, 1.0, where),
        use_rslora=_flag(config, "use_rslora", where),
        fan_in_fan_out=_flag(config, "fan_in_fan_out", where),
    )


def targeted(config: Mapping[str, JsonValue], attach_points: Collection[str], *, where: str) -> list[str]:
    """The attach points that the config's keys select, by peft's rules restricted to literal names."""
    targets = config.get("target_modules")
    excluded = _literals(config, "exclude_modules", where) or frozenset()
    layers = _layer_numbers(config.get("layers_to_transform"), where)
    patterns = _literals(config, "layers_pattern", where)
    if targets == _ALL_LINEAR:
        chosen = [name for name in attach_points if name.rsplit(".", 1)[-1] != _OUTPUT_HEAD]
    else:
        literals = _literals(config, "target_modules", where) or frozenset()
        chosen = [name for name in attach_points if not literals.isdisjoint(suffixes(name))]
    return [
        name
        for name in chosen
        if excluded.isdisjoint(suffixes(name)) and (not layers or _layer_of(name, patterns) in layers)
    ]


def suffixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in reversed(range(len(parts))))


def _layer_of(name: str, patterns: Collection[str] | None) -> int | None:
    """The first numbered component that follows one of `patterns` (any component, where there are none)."""
    parts = name.split(".")
    for before, number in pairwise(parts):
        if number.isdigit() and (not patterns or before in patterns):
            return int(number)
    return None


def _literals(config: Mapping[str, JsonValue], key: str, where: str) -> frozenset[str] | None:
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


def _rank(value: JsonValue, max_rank: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max_rank:
        raise AdapterError(f"r must be an integer from 1 to {max_rank}, not {clip(value)}", where=where)
    return value


def _number(config: Mapping[str, JsonValue], key: str, default: float, low: float, high: float, where: str) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise AdapterError(f"{key} must be a number from {low:g} to {high:g}, not {clip(value)}", where=where)
    return float(value)


def _flag(config: Mapping[str, JsonValue], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise AdapterError(f"{key} must be true or false, not {clip(value)}", where=where)
    return value


def _is_one_of(value: JsonValue, allowed: Iterable[JsonValue]) -> bool:
    """Equality that does not take 0 for false or 1 for true."""
    return any(type(value) is type(item) and value == item for item in allowed)


def clip(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
