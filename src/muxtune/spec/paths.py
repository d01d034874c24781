"""Which keys of a job are paths of data, and how they are joined to the config file's folder."""

from __future__ import annotations

import os
from dataclasses import replace

from muxtune.errors import ConfigError
from muxtune.spec.scalars import is_flag, parse_number
from muxtune.spec.tree import Items, Leaf, Node, Table

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


def with_data_paths(job: Table, folder: str, at: str = "") -> Table:
    """A canonical job with its data sets, validation, adapter and template files relative to the working directory.

    `folder` is the config file's, as it was given: a relative one gives relative paths, which stay true when the whole
    project moves and say nothing of the machine. Raises ConfigError where a number or a flag stands for a data set;
    `at` is the job's place in it.
    """
    entries = dict(job.entries)
    if (datasets := entries.get("datasets")) is not None:
        _check_paths(datasets, at)
    for key in ("datasets", "validation", "adapter_path"):
        if key in entries:
            entries[key] = _joined(entries[key], folder)
    template = entries.get("chat_template")
    if isinstance(template, Leaf) and template.text is not None and is_template_file(template.text):
        entries["chat_template"] = _joined(template, folder)
    return replace(job, entries=entries)


def is_template_file(chat_template: str) -> bool:
    """Whether `chat_template` names a file, rather than a bundled template."""
    return "/" in chat_template or os.sep in chat_template or chat_template.lower().endswith(_TEMPLATE_SUFFIXES)


def _check_paths(datasets: Node, at: str) -> None:
    """What stands for a data set by itself is a path; a file that is called like a number is `{path: 5}`."""
    for node in datasets.nodes if isinstance(datasets, Items) else (datasets,):
        text = node.text if isinstance(node, Leaf) else None
        if text is not None and (parse_number(text) is not None or is_flag(text)):
            where = node.origin.at(at, "datasets")
            raise ConfigError(f"should be paths of data files, got {text}", where=where, hint="datasets: [data.jsonl]")


def _joined(node: Node, folder: str) -> Node:
    """Every path in a data set, a list of them, or a path alone."""
    if isinstance(node, Leaf):
        if not node.text:
            return node
        return Leaf(os.path.normpath(os.path.join(folder, os.path.expanduser(node.text))), node.origin)
    if isinstance(node, Items):
        return Items(tuple(_joined(item, folder) for item in node.nodes), node.origin)
    path = node.get("path")
    return node if path is None else replace(node, entries={**node.entries, "path": _joined(path, folder)})
