"""A job over its defaults: mappings merge deeply, everything else is replaced whole.

One rule of its own: a `peft` of another type than the one below it inherits nothing from it. Short names compare by
the type they stand for.
"""

from __future__ import annotations

from dataclasses import replace

from muxtune.spec.peft import peft_family
from muxtune.spec.tree import Leaf, Node, Table, is_null


def merge_job(below: Table, above: Table) -> Table:
    """`above` over `below`; both canonical (aliases.py)."""
    peft_below, peft_above = below.get("peft"), above.get("peft")
    if isinstance(peft_below, Table) and isinstance(peft_above, Table) and _another_type(peft_below, peft_above):
        below = below.without("peft")
    return merge(below, above)


def merge(below: Table, above: Table) -> Table:
    entries: dict[str, Node] = dict(below.entries)
    for key, node in above.entries.items():
        under = entries.get(key)
        entries[key] = merge(under, node) if isinstance(under, Table) and isinstance(node, Table) else node
    return replace(above, entries=entries)


def without_nulls(table: Table) -> Table:
    """A null takes back what stood below it: the key has its default again."""
    kept: dict[str, Node] = {}
    for key, node in table.entries.items():
        if isinstance(node, Table):
            kept[key] = without_nulls(node)
        elif not is_null(node):
            kept[key] = node
    return replace(table, entries=kept)


def _another_type(below: Table, above: Table) -> bool:
    """Whether `above` states a type of another family than that of `below` (lora where it states none)."""
    stated = above.get("type")
    if not isinstance(stated, Leaf) or stated.text is None:
        return False
    base = below.get("type")
    return peft_family(stated.text) != peft_family((base.text if isinstance(base, Leaf) else None) or "lora")
