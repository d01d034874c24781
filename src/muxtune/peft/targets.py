"""Which attach points an adapter hooks: all of a kind, or literal names and suffixes. Never a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from muxtune.errors import AdapterError
from muxtune.peft.base import BackboneView, BaseOp, LinearBase, NormBase

Op = TypeVar("Op")


def linears(view: BackboneView) -> dict[str, LinearBase]:
    """The linears among a backbone's attach points."""
    return {name: cast("LinearBase", op) for name, op in view.ops.items() if op.kind == "linear"}


def norms(view: BackboneView) -> dict[str, NormBase]:
    """The norms among a backbone's attach points."""
    return {name: cast("NormBase", op) for name, op in view.ops.items() if op.kind == "norm"}


def select_any(targets: str | Sequence[str], view: BackboneView) -> list[BaseOp]:
    """The linears, and where they are named the token embedding and the head, in the backbone's order.

    Raises AdapterError as `select` does.
    """
    ops: dict[str, BaseOp] = dict(linears(view))
    if not isinstance(targets, str):
        before = {name: op for name, op in view.ends.items() if op.kind == "embedding"}
        ops = {**before, **ops, **view.ends}  # a key keeps the place it had first
    return list(select(targets, ops).values())


def select(targets: str | Sequence[str], ops: Mapping[str, Op], *, what: str = "linear layer") -> dict[str, Op]:
    """Those of `ops` - each a `what` - that `targets` names, in the backbone's order.

    Raises AdapterError naming the targets that match nothing, and what there is.
    """
    everything = "all-norms" if what == "norm" else "all-linear"
    if targets == everything:
        return dict(ops)
    wanted = [targets] if isinstance(targets, str) else list(targets)
    unknown = [target for target in wanted if not any(matches(target, name) for name in ops)]
    if unknown:
        suffixes = sorted({name.rsplit(".", 1)[-1] for name in ops})
        raise AdapterError(
            f"target_modules {', '.join(map(repr, unknown))} match no {what} of the base model",
            hint=f"it has: {', '.join(suffixes)}, or {everything!r}",
        )
    return {name: op for name, op in ops.items() if any(matches(target, name) for target in wanted)}


def matches(target: str, name: str) -> bool:
    """peft's rule for literal names: the whole path, or a suffix at a dot."""
    return name == target or name.endswith(f".{target}")
