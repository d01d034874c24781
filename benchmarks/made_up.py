"""Devices that are made up, so that their knee is known, and every partition of tasks: what plans are held against.

Measurements of planning and tests of it share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from muxtune.plan.loads import TaskLoad
from muxtune.plan.profile import AdapterCost, Curve, Directions, OperatorTable


def table(knee: int = 256, *, layers: int = 4, full_s: float = 1e-3, entry_s: float = 0.0) -> OperatorTable:
    """A device that takes `full_s` for up to `knee` rows of a layer, and in proportion above."""
    base = Curve((16.0, float(max(knee, 17)), 2.0 * max(knee, 17)), (full_s, full_s, 2 * full_s))
    nothing = Curve((1.0, 2.0), (0.0, 0.0))
    by_row = Curve((1.0, 2.0), (1e-7, 2e-7))
    return OperatorTable(
        model="made-up",
        device="cpu",
        dtype="float32",
        threads=1,
        layers=layers,
        row_bytes=256,
        entry=Curve((1.0, 2.0), (entry_s, entry_s)),
        layer={1: Directions(base, base)},
        attention=Directions(by_row, by_row),
        head=Directions(by_row, by_row),
        adapters={"lora": (AdapterCost(1000, Directions(nothing, nothing)),)},
        optimizer=by_row,
    )


def partitions(tasks: Sequence[TaskLoad]) -> Iterator[list[list[TaskLoad]]]:
    """Every partition there is."""
    if not tasks:
        yield []
        return
    for rest in partitions(tasks[1:]):
        yield [[tasks[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [tasks[0], *rest[place]], *rest[place + 1 :]]
