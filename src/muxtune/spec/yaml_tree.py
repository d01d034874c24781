"""YAML text to a tree with line numbers, within bounds.

Built on the parser's events, not on its constructors: nothing in a file can name a type to build, scalars keep their
text, and size, depth and the *expanded* number of values are checked while they grow. An anchor used twice shares one
immutable node, but counts as often as it is used, so a bomb of nested anchors stops at MAX_VALUES in no time.
Duplicate keys are refused (YAML forbids them, PyYAML keeps the last). `<<` merges mappings under their own keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import yaml

from muxtune.errors import ConfigError
from muxtune.spec.tree import Items, Leaf, Node, Origin, Table

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 100_000

_NULLS = ("", "~", "null", "Null", "NULL")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: str | os.PathLike[str], *, belongs: str = "base_model, output_dir and jobs belong here") -> Table:
    """The mapping in a file; `belongs` is the hint for an empty one."""
    source = os.fspath(path)
    try:
        with open(source, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=source) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES >> 20} MiB", where=source, hint="a config holds no data")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8 text", where=f"{source}:{line}") from None
    node = parse_yaml(text, source)
    if node is None:
        raise ConfigError("is empty", where=source, hint=belongs)
    if not isinstance(node, Table):
        raise ConfigError("should be a mapping of keys to values", where=node.origin.place)
    return node


def parse_yaml(text: str, source: str, *, lines: bool = True) -> Node | None:
    """The tree of one YAML document, or None where there is none. `lines` off: origins name the source alone."""
    builder = _Builder(source, lines)
    try:
        return builder.document(iter(yaml.parse(text, Loader=_LOADER)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"is not YAML: {problem}", where=builder.origin(mark).place) from None
    except yaml.YAMLError as error:
        problem = str(getattr(error, "reason", None) or "unreadable")
        raise ConfigError(f"is not YAML: {problem}", where=source) from None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(event: yaml.ScalarEvent) -> bool:
    """Whether the scalar stands without quotes or tag (the parsers differ in how they say it by style)."""
    return bool(event.implicit[0])


class _Mark(Protocol):
    """A place in the text, of the C parser or the Python one."""

    @property
    def line(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Anchored:
    node: Node
    values: int
    height: int


@dataclass(slots=True)
class _Builder:
    source: str
    lines: bool
    values: int = 0
    anchors: dict[str, _Anchored] = field(default_factory=dict)

    def origin(self, mark: _Mark | None) -> Origin:
        return Origin(self.source, mark.line + 1 if mark is not None and self.lines else None)

    def fault(self, event: yaml.Event, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(message, where=self.origin(event.start_mark).place, hint=hint)

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        node: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if node is not None:
                    raise self.fault(event, "holds more than one YAML document", "one run a file")
                node, _ = self.build(next(events), events, 1)
        return node

    def build(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> tuple[Node, int]:
        """The node that starts at `event`, and its height."""
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        before = self.values
        self.grow(event, 1, depth)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise self.fault(event, f"has the YAML tag {tag}", "tags are not read; write the plain value")
        if isinstance(event, yaml.ScalarEvent):
            if not _is_text(event.value):
                raise self.fault(event, "holds a lone surrogate, which is no text")
            null = _is_plain(event) and event.value in _NULLS
            node: Node = Leaf(None if null else event.value, self.origin(event.start_mark))
            height = 1
        elif isinstance(event, yaml.SequenceStartEvent):
            node, height = self.sequence(event, events, depth)
        else:
            assert isinstance(event, yaml.MappingStartEvent)
            node, height = self.mapping(event, events, depth)
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self.anchors[anchor] = _Anchored(node, self.values - before, height)
        return node, height

    def grow(self, event: yaml.Event, values: int, depth: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise self.fault(event, f"holds more than {MAX_VALUES} values", "anchors count as often as they are used")
        if depth > MAX_DEPTH:
            raise self.fault(event, f"is nested more than {MAX_DEPTH} deep")

    def alias(self, event: yaml.AliasEvent, depth: int) -> tuple[Node, int]:
        known = self.anchors.get(event.anchor or "")
        if known is None:
            raise self.fault(event, f"*{event.anchor} is used before the end of its anchor")
        self.grow(event, known.values, depth + known.height - 1)
        return known.node, known.height

    def sequence(self, start: yaml.Event, events: Iterator[yaml.Event], depth: int) -> tuple[Node, int]:
        nodes: list[Node] = []
        height = 0
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            node, below = self.build(event, events, depth + 1)
            nodes.append(node)
            height = max(height, below)
        return Items(tuple(nodes), self.origin(start.start_mark)), height + 1

    def mapping(self, start: yaml.Event, events: Iterator[yaml.Event], depth: int) -> tuple[Node, int]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        height = 0
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self.fault(event, "a key should be a plain word")
            node, below = self.build(next(events), events, depth + 1)
            height = max(height, below)
            if event.value == "<<" and _is_plain(event):
                merged = {**self.merged(event, node), **merged}
            elif event.value in entries:
                first = entries[event.value].origin.place
                raise self.fault(event, f"key {event.value!r} is given twice", f"first at {first}")
            else:
                # A value is found at its key: a list's or mapping's own first line may be the one below.
                entries[event.value] = replace(node, origin=self.origin(event.start_mark))
        return Table({**merged, **entries}, self.origin(start.start_mark)), height + 1

    def merged(self, event: yaml.Event, node: Node) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for table in node.nodes if isinstance(node, Items) else (node,):
            if not isinstance(table, Table):
                raise self.fault(event, "<< should name a mapping, or a list of them")
            found = {**table.entries, **found}
        return found
