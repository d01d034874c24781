"""The latency model: what a pass takes, from the operator table.

    pass     = entry(rows) + layers x layer + head(trained)
    layer    = base(sum of rows) + sum over sequences of attention + sum over members of adapter / layers
    step     = optimizer(parameters), of each task

Only the base operators and the head see the sum over members: that is what fusing changes. What is a sequence's or a
member's own adds up, whoever runs together. Rows are those that run, padded to a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from muxtune.plan.loads import ChunkLoad, TaskLoad
from muxtune.plan.profile import Curve, Directions, Floats, OperatorTable

ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass. `forward_s`, `backward_s`: of one layer; the latter is 0 where nothing trains.
    `exit_s`: of the head, the losses and their gradient."""

    rows: int
    entry_s: float
    forward_s: float
    backward_s: float
    exit_s: float

    def total_s(self, layers: int) -> float:
        return self.entry_s + layers * (self.forward_s + self.backward_s) + self.exit_s


class CostModel:
    """Args:
    degree: of tensor parallelism; the table must have measured it.
    recompute: whether a layer runs again on the way back.
    scale: of every prediction: what the steps that ran took over what had been predicted.
    """

    def __init__(self, table: OperatorTable, *, degree: int = 1, recompute: bool = False, scale: float = 1.0) -> None:
        self.table = table
        self.layers = table.layers
        self.recompute = recompute
        self.scale = scale
        self._layer = table.layer[degree]

    def shared_s(self, rows: Floats, trained: Floats, *, trains: bool) -> Floats:
        """What of a pass depends on its members together, all layers: seconds at each (rows, trained rows)."""
        run = padded_rows(rows)
        entry, forward, backward, leave = self._shared(run, trained, trains)
        return self.scale * (entry + self.layers * (forward + backward) + leave)

    def own_s(self, task: TaskLoad, chunk: ChunkLoad) -> float:
        """What of a pass is a member's own, all layers: it adds up."""
        forward, backward = self._own(task, chunk)
        return self.layers * (forward + backward)

    def pass_cost(self, members: Sequence[tuple[TaskLoad, ChunkLoad]], *, width: int = 0) -> PassCost:
        """Of one pass; every sequence takes at least `width` rows of it."""
        rows = sum(max(span.rows, width) for _, chunk in members for span in chunk.spans)
        trained = np.float64(sum(chunk.trained for _, chunk in members))
        trains = any(chunk.trains for _, chunk in members)
        run = padded_rows(np.float64(rows))
        entry, forward, backward, leave = (float(part) for part in self._shared(run, np.asarray(trained), trains))
        for member in members:
            own_forward, own_backward = self._own(*member)
            forward += own_forward / self.scale
            backward += own_backward / self.scale
        return PassCost(int(run), self.scale * entry, self.scale * forward, self.scale * backward, self.scale * leave)

    def step_s(self, task: TaskLoad) -> float:
        """Of one optimizer step."""
        return self.scale * float(self.table.optimizer(task.parameters))

    def _shared(self, run: Floats, trained: Floats, trains: bool) -> tuple[Floats, Floats, Floats, Floats]:
        forward = self._layer.forward(run)
        backward = self._layer.backward(run) if trains else np.zeros_like(forward)
        if trains and self.recompute:
            backward = backward + forward
        leave = self.table.head.forward(trained)
        if trains:
            leave = leave + self.table.head.backward(trained)
        return self.table.entry(run), forward, backward, leave

    def _own(self, task: TaskLoad, chunk: ChunkLoad) -> tuple[float, float]:
        """Forward and backward of one layer."""
        adapter = self._adapter(task, chunk.rows)
        forward = self._spans(self.table.attention.forward, chunk) + adapter[0] / self.layers
        if not chunk.trains:
            return self.scale * forward, 0.0
        backward = self._spans(self.table.attention.backward, chunk) + adapter[1] / self.layers
        return self.scale * forward, self.scale * (backward + (forward if self.recompute else 0.0))

    @staticmethod
    def _spans(curve: Curve, chunk: ChunkLoad) -> float:
        """A piece that sees P positions and brings R rows costs what P do, less what those before it do."""
        stops = np.array([span.positions for span in chunk.spans], np.float64)
        starts = stops - np.array([span.rows for span in chunk.spans], np.float64)
        return float(np.sum(curve(stops) - curve(starts)))

    def _adapter(self, task: TaskLoad, rows: int) -> tuple[float, float]:
        """Of all layers; between two measured sizes of a type, linear in the parameters."""
        known = self.table.adapters.get(task.adapter) or self.table.adapters.get("lora") or ()
        if not known:
            return 0.0, 0.0
        sizes = [one.parameters for one in known]

        def at(part: Iterable[Directions], direction: str) -> float:
            seconds = [float(getattr(cost, direction)(rows)) for cost in part]
            return float(np.interp(task.parameters, sizes, seconds))

        costs = [one.cost for one in known]
        return at(costs, "forward"), at(costs, "backward")


def padded_rows(rows: Floats | np.float64) -> Floats:
    """Up to the multiple that the backbone runs."""
    return np.asarray(np.ceil(np.asarray(rows) / ROW_MULTIPLE) * ROW_MULTIPLE, np.float64)
