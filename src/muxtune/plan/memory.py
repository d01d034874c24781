"""The memory model: bytes that tasks and passes hold, and the cap that no plan may exceed.

    held  = process + weights + sum over tasks of (adapter + gradient + optimizer state + keys and values carried)
    peak  = held + the largest pass's activations, and those kept: head + rows x (row + score x longest sequence)

Rows and longest are upper bounds over all steps of the members, so that no actual round holds more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from muxtune.plan.loads import TaskLoad, packed_rows

Count = TypeVar("Count", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Attributes:
    base_bytes: the process and the weights.
    head_bytes: logits of one slice of trained positions.
    row_bytes, score_bytes: activations of one row, all layers; of one row and one position that it sees.
    position_bytes: keys and values of one carried position, and their gradient, all layers.
    cap_bytes: what there is; None: no limit.
    keep_tokens: rows whose activations may be kept beside a pass, of what no pass needs.
    """

    base_bytes: int = 0
    head_bytes: int = 0
    row_bytes: int = 1
    score_bytes: int = 0
    position_bytes: int = 0
    cap_bytes: int | None = None
    keep_tokens: int = 0

    def held_bytes(self, tasks: Iterable[TaskLoad]) -> int:
        """Whatever runs."""
        own = sum(task.state_bytes + task.carried * self.position_bytes for task in tasks)
        return self.base_bytes + own

    def pass_bytes(self, rows: Count, longest: Count) -> Count:
        """Of passes of so many rows whose longest sequences see so many positions: numbers, or arrays of them."""
        return self.head_bytes + rows * (self.row_bytes + self.score_bytes * longest)

    def rows_within(self, free_bytes: int, longest: int) -> int:
        """The most rows of a pass that takes no more than `free_bytes`."""
        return max(0, free_bytes - self.head_bytes) // (self.row_bytes + self.score_bytes * longest)

    def peak_bytes(
        self,
        tasks: Sequence[TaskLoad],
        htasks: Iterable[Sequence[TaskLoad]],
        rows_of: Callable[[Sequence[TaskLoad]], int] = packed_rows,
    ) -> int:
        """Of a plan that fuses `tasks` as `htasks`, whose largest pass has `rows_of` rows."""

        def rows(htask: Sequence[TaskLoad]) -> int:
            return rows_of(htask) + min(self.keep_tokens, sum(one.kept for one in htask))

        passes = (self.pass_bytes(rows(htask), max(one.longest for one in htask)) for htask in htasks)
        return self.held_bytes(tasks) + max(passes, default=0)

    def free_bytes(self, tasks: Iterable[TaskLoad]) -> int | None:
        """What is left for a pass beside what `tasks` hold; None: no limit."""
        return None if self.cap_bytes is None else self.cap_bytes - self.held_bytes(tasks)


def size_text(size_bytes: int) -> str:
    """1536000 -> "1.5 MB": three digits at most before the point, decimal units."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
