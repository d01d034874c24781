"""`matrix:` a job becomes one job for every point of a grid, of random draws, or of both.

    grid:    {KEY: [values], "KEY,KEY": [[value, value], ...]}     keys joined by a comma vary together
    random:  {samples: 16, seed: 1, KEY: {log_uniform: [low, high]}}
    exclude: [{KEY: value}]                                        points that have all these values are left out

A point is named by its values (`lr0.001-r8-alpha16`), so a name stays when the grid grows. Draw i of a key is a hash
of (seed, key, i): it stays when samples or other keys are added. The number of points is bounded before any is made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muxtune.errors import ConfigError
from muxtune.spec.aliases import canonical_job
from muxtune.spec.border import unknown_key
from muxtune.spec.draws import read_draw
from muxtune.spec.merge import merge
from muxtune.spec.scalars import parse_number, read_integer
from muxtune.spec.tree import Items, Leaf, Node, Path, Table, as_items, as_table, is_null, nested, noted, values

MAX_POINTS = 4096

_LABELS = {
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accum",
    "warmup_steps": "warmup",
    "weight_decay": "decay",
    "max_steps": "steps",
    "lr_scheduler_type": "schedule",
    "target_modules": "targets",
}
_WORD = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values: the keys that vary, each at one value."""

    settings: tuple[tuple[Path, Node], ...]

    @property
    def paths(self) -> frozenset[Path]:
        return frozenset(path for path, _ in self.settings)

    @property
    def overrides(self) -> Table:
        table = Table()
        for path, node in self.settings:
            table = merge(table, nested(path, node))
        return table

    @property
    def suffix(self) -> str:
        return "-".join(_label(path, node) for path, node in self.settings)


Axis = tuple[Point, ...]  # the points of one key, or of keys that vary together


def read_matrix(node: Node | None, at: str = "matrix") -> tuple[Point, ...]:
    """All points of a matrix in the order of the file; none where there is no matrix."""
    if is_null(node) or (isinstance(node, Leaf) and (node.text or "").lower() in ("false", "no", "off")):
        return ()
    table = as_table(node, at)
    for key, part in table.entries.items():
        if key == "halving" and not is_null(part):
            raise ConfigError("is not supported yet", where=part.origin.at(at, key), hint="supported: grid and random")
        if key not in ("grid", "random", "exclude", "halving"):
            raise unknown_key(key, ("grid", "random", "exclude", "halving"), where=part.origin.at(at))
    axes = _grid(as_table(table.get("grid"), f"{at}.grid"), f"{at}.grid")
    draws = _random(as_table(table.get("random"), f"{at}.random"), f"{at}.random")
    if draws:
        axes = (*axes, draws)
    if not axes:
        raise ConfigError("varies nothing", where=table.origin.at(at), hint="grid: {learning_rate: [1e-4, 2e-4]}")
    if math.prod(len(axis) for axis in axes) > MAX_POINTS:
        raise ConfigError(f"has more than {MAX_POINTS} points", where=table.origin.at(at))
    _check_disjoint(axes, at)
    points = tuple(_joined(combination) for combination in itertools.product(*axes))
    return _without_excluded(points, as_items(table.get("exclude"), f"{at}.exclude"), bool(draws), f"{at}.exclude")


def _joined(points: Iterable[Point]) -> Point:
    return Point(tuple(setting for point in points for setting in point.settings))


def _point(keys: str, node: Node, at: str) -> Point:
    """The canonical settings of `KEY: value`, or of `KEY,KEY: [value, value]`."""
    names = [part.strip() for part in keys.split(",")]
    if len(names) == 1:
        return Point(_settings(names[0], node, at))
    if not isinstance(node, Items) or len(node.nodes) != len(names):
        raise ConfigError(f"should be lists of {len(names)} values", where=node.origin.at(at, keys))
    return Point(tuple(s for name, item in zip(names, node.nodes, strict=True) for s in _settings(name, item, at)))


def _settings(key: str, node: Node, at: str) -> tuple[tuple[Path, Node], ...]:
    path = tuple(key.split("."))
    if path[0] in ("name", "matrix"):
        raise ConfigError(f"{path[0]} cannot vary", where=node.origin.at(at, key))
    return tuple(values(canonical_job(nested(path, noted(node, "matrix")), at)))


def _grid(table: Table, at: str) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    for keys, node in table.entries.items():
        choices = as_items(node, f"{at}.{keys}").nodes
        if not choices:
            raise ConfigError("has no values", where=node.origin.at(at, keys))
        axes.append(tuple(_point(keys, choice, at) for choice in choices))
    return tuple(axes)


def _random(table: Table, at: str) -> Axis:
    """One axis of all draws: draw i takes the i-th value of every key; equal draws are one point."""
    keys = {key: node for key, node in table.entries.items() if key not in ("samples", "seed")}
    if not table.entries:
        return ()
    samples, seed = _count(table, "samples", None, at), _count(table, "seed", 0, at)
    if not 1 <= samples <= MAX_POINTS:
        raise ConfigError(f"should be from 1 to {MAX_POINTS}", where=table.origin.at(at, "samples"))
    if not keys:
        raise ConfigError("draws nothing", where=table.origin.at(at), hint="learning_rate: {log_uniform: [1e-4, 1e-2]}")
    draws = {key: read_draw(node, f"{at}.{key}") for key, node in keys.items()}
    points = (
        _joined(_point(key, draw(seed, key, index), at) for key, draw in draws.items()) for index in range(samples)
    )
    return tuple({point.suffix: point for point in points}.values())


def _count(table: Table, key: str, default: int | None, at: str) -> int:
    node = table.get(key)
    if is_null(node) and default is not None:
        return default
    origin = node.origin if node else table.origin
    if not isinstance(node, Leaf) or is_null(node):
        raise ConfigError("should be a whole number", where=origin.at(at, key))
    try:
        return read_integer(node.text)
    except ConfigError as error:
        raise ConfigError(error.message, where=origin.at(at, key)) from None


def _check_disjoint(axes: Sequence[Axis], at: str) -> None:
    seen: set[Path] = set()
    for axis in axes:
        paths = {path: node for point in axis for path, node in point.settings}
        for path, node in paths.items():
            if path in seen:
                raise ConfigError(f"{'.'.join(path)} varies twice", where=node.origin.at(at))
        seen.update(paths)


def _without_excluded(points: tuple[Point, ...], rules: Items, drawn: bool, at: str) -> tuple[Point, ...]:
    varied = {path for point in points for path, _ in point.settings}
    for rule in rules.nodes:
        wanted: dict[Path, object] = {}
        for key, node in as_table(rule, at).entries.items():
            for path, value in _point(key, node, at).settings:
                if path not in varied:
                    raise ConfigError(f"{key} does not vary", where=node.origin.at(at))
                wanted[path] = _typed(value)
        if not wanted:
            raise ConfigError("an empty rule would exclude everything", where=rule.origin.at(at))
        kept = tuple(point for point in points if not _matches(point, wanted))
        if len(kept) == len(points) and not drawn:
            raise ConfigError("excludes nothing: no point has these values", where=rule.origin.at(at))
        points = kept
    if not points:
        raise ConfigError("excludes every point", where=rules.origin.at(at))
    return points


def _matches(point: Point, wanted: dict[Path, object]) -> bool:
    have = {path: _typed(node) for path, node in point.settings}
    return all(path in have and have[path] == value for path, value in wanted.items())


def _typed(node: Node) -> object:
    """The value to compare by: 2e-3 and 0.002 are one."""
    if isinstance(node, Items):
        return tuple(_typed(item) for item in node.nodes)
    if isinstance(node, Table):
        return {key: _typed(below) for key, below in node.entries.items()}
    number = parse_number(node.text) if node.text is not None else None
    return node.text if number is None else number


def _label(path: Path, node: Node) -> str:
    value = _typed(node)
    label = _LABELS.get(path[-1], path[-1])
    if isinstance(value, int | float):
        return label + _number_text(value)
    return f"{label}-{_word(value)}"


def _number_text(value: int | float) -> str:
    """Shortest text that reads back as the value: 0.001, 1e-5."""
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].replace("+", ""), repr(value))


def _word(value: object) -> str:
    """A value as part of a name: itself where that is safe, else what is safe of it and a hash that tells it apart."""
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value
    text = json.dumps(value, sort_keys=True)
    safe = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:24]
    return f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
