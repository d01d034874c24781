"""Which keys of a job are paths of data, and how they are joined to the config file's folder."""

from __future__ import annotations

import os
from dataclasses import replace

from muxtune.spec.tree import Items, Leaf, Node, Table

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


def with_data_paths(job: Table, folder: str) -> Table:
    """A canonical job with its data sets, validation, adapter and template files relative to the working directory.

    `folder` is the config file's, as it was given: a relative one gives relative paths, which stay true when the whole
    project moves and say nothing of the machine.
    """
    entries = dict(job.entries)
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
