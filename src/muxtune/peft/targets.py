"""Which attach points an adapter hooks: `all-linear`, or literal names and suffixes. Never a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from muxtune.errors import AdapterError
from muxtune.peft.base import BackboneView, LinearBase

Op = TypeVar("Op")


def linears(view: BackboneView) -> dict[str, LinearBase]:
    """The linears among a backbone's attach points."""
    return {name: cast("LinearBase", op) for name, op in view.ops.items() if op.kind == "linear"}


def select(targets: str | Sequence[str], ops: Mapping[str, Op]) -> dict[str, Op]:
    """The attach points that `targets` names, in the backbone's order.

    Raises AdapterError naming the targets that match nothing, and what there is.
    """
    if targets == "all-linear":
        return dict(ops)
    wanted = [targets] if isinstance(targets, str) else list(targets)
    unknown = [target for target in wanted if not any(matches(target, name) for name in ops)]
    if unknown:
        suffixes = sorted({name.rsplit(".", 1)[-1] for name in ops})
        raise AdapterError(
            f"target_modules {', '.join(map(repr, unknown))} match no linear layer of the base model",
            hint=f"it has: {', '.join(suffixes)}, or 'all-linear'",
        )
    return {name: op for name, op in ops.items() if any(matches(target, name) for target in wanted)}


def matches(target: str, name: str) -> bool:
    """peft's rule for literal names: the whole path, or a suffix at a dot."""
    return name == target or name.endswith(f".{target}")
