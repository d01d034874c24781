"""Config text as a tree in which every value knows where it came from.

A leaf is the text of a scalar as it was written (None for YAML's null): its field reads it later (scalars.py). Trees
are immutable, so parts are shared freely; a path is a tuple of keys and list indices, all as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from muxtune.errors import ConfigError

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was given: `three.yaml:9 (defaults)`, `--set learning_rate`, `default`."""

    source: str
    line: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def noted(self, note: str) -> Origin:
        return replace(self, notes=(*self.notes, note))

    def at(self, *path: str) -> str:
        """The place of a key: `three.yaml:9 jobs.sql.seed`."""
        key = ".".join(part for part in path if part)
        return f"{self.place} {key}" if key else self.place

    def __str__(self) -> str:
        return f"{self.place} ({', '.join(self.notes)})" if self.notes else self.place


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Leaf:
    text: str | None
    origin: Origin


@dataclass(frozen=True, slots=True)
class Items:
    nodes: tuple[Node, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Table:
    entries: Mapping[str, Node] = field(default_factory=dict)
    origin: Origin = DEFAULT

    def get(self, key: str) -> Node | None:
        return self.entries.get(key)

    def without(self, *keys: str) -> Table:
        return replace(self, entries={key: node for key, node in self.entries.items() if key not in keys})


Node = Leaf | Items | Table


def plain(node: Node) -> object:
    """The tree as dicts, lists and text, origins dropped."""
    if isinstance(node, Leaf):
        return node.text
    if isinstance(node, Items):
        return [plain(item) for item in node.nodes]
    return {key: plain(below) for key, below in node.entries.items()}


def noted(node: Node, note: str) -> Node:
    """The tree with a note on the origin of every value."""
    origin = node.origin.noted(note)
    if isinstance(node, Leaf):
        return Leaf(node.text, origin)
    if isinstance(node, Items):
        return Items(tuple(noted(item, note) for item in node.nodes), origin)
    return Table({key: noted(below, note) for key, below in node.entries.items()}, origin)


def nested(path: Path, node: Node) -> Table:
    """A table that holds `node` at `path` and nothing else."""
    assert path
    for key in reversed(path):
        node = Table({key: node}, node.origin)
    assert isinstance(node, Table)
    return node


def values(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """The leaves, and lists as wholes, with their paths: what a merge replaces as one."""
    if isinstance(node, Table):
        for key, below in node.entries.items():
            yield from values(below, (*path, key))
    else:
        yield path, node


def child(node: Node, key: str) -> Node | None:
    """The node under a key, or at an index of a list."""
    if isinstance(node, Table):
        return node.get(key)
    if isinstance(node, Items) and key.isdecimal() and int(key) < len(node.nodes):
        return node.nodes[int(key)]
    return None


def way_to(node: Node, path: Path) -> Iterator[Node]:
    """The nodes on the way to `path`, the root first, as far as they were given."""
    yield node
    for key in path:
        below = child(node, key)
        if below is None:
            return
        node = below
        yield node


def origin_at(node: Node, path: Path) -> Origin:
    """Where the value at `path` was given. What was written short (one text for a mapping) has the text's origin."""
    way = list(way_to(node, path))
    given = len(way) == len(path) + 1 or isinstance(way[-1], Leaf)
    return way[-1].origin if given else DEFAULT


def is_null(node: Node | None) -> bool:
    """Absent, or YAML's null."""
    return node is None or (isinstance(node, Leaf) and node.text is None)


def as_table(node: Node | None, at: str) -> Table:
    """`node`, found at key `at`, as a mapping; nothing and null are the empty one."""
    if isinstance(node, Table):
        return node
    if node is None or is_null(node):
        return Table(origin=node.origin if node else DEFAULT)
    raise ConfigError("should be a mapping of keys to values", where=node.origin.at(at))


def as_items(node: Node | None, at: str) -> Items:
    if isinstance(node, Items):
        return node
    if node is None or is_null(node):
        return Items((), node.origin if node else DEFAULT)
    raise ConfigError("should be a list", where=node.origin.at(at))
