"""Random values of a sweep: `{log_uniform: [1e-4, 1e-2]}` and its kin.

A draw is a pure function of (seed, key, index): no generator whose state would make one key's values depend on
another's, or on how many were drawn before. Real values are rounded to 4 digits, so that the name of a job says its
value in full.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from muxtune.errors import ConfigError
from muxtune.spec.border import unknown_key
from muxtune.spec.scalars import read_number
from muxtune.spec.tree import Items, Leaf, Node, Table

Draw = Callable[[int, str, int], Node]  # (seed, key, index) -> value

_KINDS = ("uniform", "log_uniform", "int_uniform", "choice")


def read_draw(node: Node, at: str) -> Draw:
    """The draws that `{KIND: [...]}` describes; `at` is its key in errors."""
    if not isinstance(node, Table) or len(node.entries) != 1:
        raise ConfigError("should name one way to draw", where=node.origin.at(at), hint=", ".join(_KINDS))
    ((kind, given),) = node.entries.items()
    if kind not in _KINDS:
        raise unknown_key(kind, _KINDS, where=given.origin.at(at))
    if not isinstance(given, Items) or not given.nodes:
        raise ConfigError("should be a list", where=given.origin.at(at, kind))
    if kind == "choice":
        options = given.nodes
        return lambda seed, key, index: options[int(_unit(seed, key, index) * len(options))]
    low, high = _bounds(given, kind, at)
    return lambda seed, key, index: Leaf(_between(kind, low, high, _unit(seed, key, index)), given.origin)


def _bounds(given: Items, kind: str, at: str) -> tuple[float, float]:
    try:
        numbers = [read_number(item.text) for item in given.nodes if isinstance(item, Leaf)]
    except ConfigError as error:
        raise ConfigError(error.message, where=given.origin.at(at, kind)) from None
    if len(numbers) != 2 or len(given.nodes) != 2 or not numbers[0] < numbers[1]:
        raise ConfigError("should be [low, high], low below high", where=given.origin.at(at, kind))
    if kind == "log_uniform" and numbers[0] <= 0:
        raise ConfigError("should be above 0", where=given.origin.at(at, kind))
    if kind == "int_uniform" and not all(isinstance(number, int) for number in numbers):
        raise ConfigError("should be whole numbers", where=given.origin.at(at, kind))
    return numbers[0], numbers[1]


def _between(kind: str, low: float, high: float, unit: float) -> str:
    if kind == "int_uniform":
        return str(int(low) + int(unit * (int(high) - int(low) + 1)))
    if kind == "log_uniform":
        value = math.exp(math.log(low) + unit * (math.log(high) - math.log(low)))
    else:
        value = low + unit * (high - low)
    return repr(min(max(float(f"{value:.4g}"), low), high))


def _unit(seed: int, key: str, index: int) -> float:
    """A number in [0, 1) that looks random: 53 bits of a hash."""
    digest = hashlib.sha256(f"{seed}\0{key}\0{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
