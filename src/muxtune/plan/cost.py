"""The latency model: what a pass takes, from the operator table.

    pass     = entry(rows) + layers x layer + head(trained)
    layer    = base(sum of rows) + sum over sequences of attention + sum over members of adapter / layers
    step     = optimizer(parameters) + what the adapter makes anew, of each task

Only the base operators and the head see the sum over members: that is what fusing changes. What is a sequence's or a
member's own adds up, whoever runs together. Rows are those that run, padded to a multiple of 16.

A pass that resumes what another has kept has no forward part, but for its entry and its head.

An adapter costs something at each attach point that it hooks, and something with its parameters: two measured sizes of
a type tell the one from the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from muxtune.plan.loads import BARE, DROPPING, ChunkLoad, Span, TaskLoad
from muxtune.plan.profile import AdapterCost, Curve, Floats, OperatorTable

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

    def shared_s(self, rows: Floats, trained: Floats, *, trains: bool, resumes: bool = False) -> Floats:
        """What of a pass depends on its members together, all layers: seconds at each (rows, trained rows)."""
        run = padded_rows(rows)
        entry, forward, backward, leave = self._shared(run, trained, trains, resumes)
        return self.scale * (entry + self.layers * (forward + backward) + leave)

    def own_s(self, task: TaskLoad, chunk: ChunkLoad) -> float:
        """What of a pass is a member's own, all layers: it adds up."""
        forward, backward = self._own(task, chunk)
        return self.scale * (self.layers * (forward + backward) + self._compared(chunk))

    def pass_cost(self, members: Sequence[tuple[TaskLoad, ChunkLoad]], *, width: int = 0) -> PassCost:
        """Of one pass; every sequence takes at least `width` rows of it."""
        filling = [width - span.rows for _, chunk in members for span in chunk.spans if span.rows < width]
        rows = sum(chunk.rows for _, chunk in members) + sum(filling)
        trained = np.float64(sum(chunk.trained for _, chunk in members))
        trains = any(chunk.trains for _, chunk in members)
        resumes = any(chunk.resumes for _, chunk in members)
        run = padded_rows(np.float64(rows))
        entry, forward, backward, leave = (
            float(part) for part in self._shared(run, np.asarray(trained), trains, resumes)
        )
        own = [self._own(*member) for member in members]
        for own_forward, own_backward in [*own, *self._filling(filling, trains, resumes)]:
            forward += own_forward
            backward += own_backward
        leave += sum(self._compared(chunk) for _, chunk in members)
        return PassCost(int(run), self.scale * entry, self.scale * forward, self.scale * backward, self.scale * leave)

    def step_s(self, task: TaskLoad) -> float:
        """Of one optimizer step."""
        known = self._known(task)
        own = _interpolated(task, known, [one.step_s for one in known])
        return self.scale * (float(self.table.optimizer(task.parameters)) + own)

    def _shared(
        self, run: Floats, trained: Floats, trains: bool, resumes: bool
    ) -> tuple[Floats, Floats, Floats, Floats]:
        forward = self._layer.forward(run)
        backward = self._layer.backward(run) if trains else np.zeros_like(forward)
        if resumes:
            forward = np.zeros_like(forward)
        elif trains and self.recompute:
            backward = backward + forward
        leave = self.table.head.forward(trained)
        if trains:
            leave = leave + self.table.head.backward(trained)
        return self.table.entry(run), forward, backward, leave

    def _filling(self, rows: Sequence[int], trains: bool, resumes: bool) -> Iterator[tuple[float, float]]:
        """Rows that are nobody's attend to each other all the same."""
        if rows:
            spans = tuple(Span(one, one) for one in rows)
            yield self._directions(ChunkLoad(spans, 0, trains, resumes=resumes), 0.0, 0.0)

    def _own(self, task: TaskLoad, chunk: ChunkLoad) -> tuple[float, float]:
        """Forward and backward of one layer."""
        known = self._known(task)
        forward, backward = (
            _interpolated(task, known, [float(curve(chunk.rows)) for curve in curves]) / self.layers
            for curves in ([one.cost.forward for one in known], [one.cost.backward for one in known])
        )
        return self._directions(chunk, forward, backward)

    def _directions(self, chunk: ChunkLoad, forward: float, backward: float) -> tuple[float, float]:
        seen = self.table.seen or self.table.attention
        forward += self._spans(self.table.attention.forward, seen.forward, chunk)
        if not chunk.trains:
            return forward, 0.0
        backward += self._spans(self.table.attention.backward, seen.backward, chunk)
        if chunk.resumes:
            return 0.0, backward
        return forward, backward + (forward if self.recompute else 0.0)

    def _spans(self, alone: Curve, seen: Curve, chunk: ChunkLoad) -> float:
        rows = np.array([span.rows for span in chunk.spans], np.float64)
        positions = np.array([span.positions for span in chunk.spans], np.float64)
        if self.table.seen is None:  # what all positions cost, less what those before the rows do
            return float(np.sum(alone(positions) - np.where(positions > rows, alone(positions - rows), 0.0)))
        return float(np.sum(np.where(positions > rows, seen(rows * positions), alone(rows))))

    def _compared(self, chunk: ChunkLoad) -> float:
        return float(self.table.head.forward(chunk.compared))

    def _known(self, task: TaskLoad) -> Sequence[AdapterCost]:
        """What is known of the task's type, or of the nearest to it."""
        if task.adapter == BARE:
            return ()
        kind = task.adapter.removesuffix(DROPPING)
        dropping = task.adapter[len(kind) :]
        names = (task.adapter, kind, kind.split("+")[0] + dropping, kind.split("+")[0], "lora")
        return next((self.table.adapters[name] for name in names if name in self.table.adapters), ())


def _interpolated(task: TaskLoad, known: Sequence[AdapterCost], seconds: Sequence[float]) -> float:
    """What a task's adapter takes where those that are known take so long: a part that goes with the attach points, and
    one with the parameters."""
    if not known:
        return 0.0
    first, last = known[0], known[-1]
    share = task.points / first.points if task.points and first.points else 1.0
    if last.parameters <= first.parameters or not task.parameters:
        return share * seconds[0]
    slope = max(0.0, (seconds[-1] - seconds[0]) / (last.parameters - first.parameters))
    return share * max(0.0, seconds[0] - slope * first.parameters) + slope * task.parameters


def padded_rows(rows: Floats | np.float64) -> Floats:
    """Up to the multiple that the backbone runs."""
    return np.asarray(np.ceil(np.asarray(rows) / ROW_MULTIPLE) * ROW_MULTIPLE, np.float64)
