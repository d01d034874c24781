"""What of a step is neither backbone, head, backward pass nor optimizer, in the round loop as a run has it.

Rounds go through `muxtune.engine.runner` with metrics and a trace on disk. *Planning* is deriving each schedule,
renewing the plan included, and learning from what passes took; *data* is choosing and chunking the examples of a step,
checking them against the schedule and packing their rows; *bookkeeping* is all that is left: records, events, metrics,
the trace, counting losses.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.baselines import Recipe
from benchmarks.loads import Load, light, non_uniform
from benchmarks.sections import Places, timed, work_of
from benchmarks.sides import EngineSide, engine_side
from muxtune.engine import executor
from muxtune.engine.engine import Engine
from muxtune.engine.executor import Executor
from muxtune.engine.metrics import MetricsFiles, step_row
from muxtune.engine.planning import Planning
from muxtune.engine.runner import Runner
from muxtune.engine.task import Task
from muxtune.engine.trace_file import TraceFile
from muxtune.models.backbone import Backbone
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable
from muxtune.spec.event import RunEvent, StepResult

LOADS: Mapping[str, Callable[..., Load]] = {"light": light, "heavy": non_uniform}
_PLANNING: Places = ((Engine, "schedule"), (Planning, "observe"))
_DATA: Places = ((Task, "participant"), (executor, "pack"), (Executor, "_check"))


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of a load's steps: their mean seconds, and what share of them went where."""

    load: str
    step_s: float
    planning: float
    data: float
    bookkeeping: float

    @property
    def together(self) -> float:
        return self.planning + self.data + self.bookkeeping


class MetricsFolder:
    """Writes the metrics of a task and nothing else (`muxtune.engine.runner.Folder`)."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._metrics = MetricsFiles(path)

    def record(self, event: RunEvent) -> None:
        """A step's row."""
        if isinstance(event, StepResult):
            self._metrics.append(step_row(event))

    def checkpoint(self, task: Task) -> str:
        return ""

    def complete(self, task: Task) -> str:
        return ""


def overheads(backbone: Backbone, table: Callable[[], OperatorTable], *, rounds: int) -> tuple[Overhead, ...]:
    """Of eight tasks with little and with much to do."""
    return tuple(_overhead(name, backbone, table, rounds) for name in LOADS)


def _overhead(name: str, backbone: Backbone, table: Callable[[], OperatorTable], rounds: int) -> Overhead:
    planning = Planning(table, MemoryModel(), backbone.places)
    load = LOADS[name](rounds + 2, vocab=backbone.vocabulary)
    side = engine_side(backbone, load, Recipe(), policy="muxtune", planning=planning)
    with tempfile.TemporaryDirectory() as output:
        steps = steps_of(side, Path(output))
        next(steps)  # plans, and warms up
        began = time.perf_counter()
        with timed({"work": work_of(backbone), "planning": _PLANNING, "data": _DATA}) as inside:
            for _ in islice(steps, rounds):
                pass
            whole_s = time.perf_counter() - began
        steps.close()
    planned, data = inside["planning"] / whole_s, inside["data"] / whole_s
    return Overhead(name, whole_s / rounds, planned, data, 1 - inside["work"] / whole_s - planned - data)


def steps_of(side: EngineSide, output: Path) -> Iterator[int]:
    """Train the side as a run does, metrics and trace in `output`; yields each time all tasks have made a step, until
    one of them is done."""
    folders = {task.name: MetricsFolder(output / task.name) for task in side.tasks}
    with TraceFile.begin(output) as trace:
        done = 0
        for event in Runner(side.engine, folders=folders, trace=trace.append).run():
            if isinstance(event, StepResult) and event.task == side.tasks[-1].name:
                done += 1
                yield done
