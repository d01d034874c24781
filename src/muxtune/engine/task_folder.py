"""The folder of one task: its job, status, metrics, events, checkpoints and, in the end, its adapter.

    NAME/job.json         the job, when it was created, and what it was trained on; there from the start
    NAME/status.json      where it stands; replaced whole at each change
    NAME/metrics.jsonl, metrics.csv, events.jsonl
    NAME/checkpoints/     muxtune.engine.checkpoint
    NAME/adapter_config.json, adapter_model.safetensors, ...    peft's format, when it is completed

A folder that holds a run is never written over: `create` refuses, `reopen` continues it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from muxtune.durable import write_durably
from muxtune.engine import checkpoint
from muxtune.engine.checkpoint import Checkpoint
from muxtune.engine.metrics import MetricsFiles, eval_row, step_row
from muxtune.engine.task import Task
from muxtune.errors import CheckpointError, StateError
from muxtune.spec.event import EvalResult, RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec

JOB, STATUS, EVENTS, CHECKPOINTS = "job.json", "status.json", "events.jsonl", "checkpoints"
Export = Callable[[Task, Path], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """What `job.json` holds: the job as it began, when, and on which base weights."""

    job: JobSpec
    created: datetime
    base: str


class TaskFolder:
    """Args: `export` writes the finished adapter into the folder (`muxtune.engine.local`)."""

    def __init__(self, path: Path, origin: Origin, export: Export) -> None:
        self.path = path
        self.origin = origin
        self._export = export
        self._metrics = MetricsFiles(path)

    @classmethod
    def create(cls, path: Path, origin: Origin, export: Export) -> TaskFolder:
        """Raises StateError where the folder holds a run already."""
        if holds_run(path):
            raise StateError(
                "this folder holds a run already", where=str(path), hint="continue it with --resume, or --overwrite"
            )
        path.mkdir(parents=True, exist_ok=True)
        stored = {
            "job": origin.job.model_dump(mode="json"),
            "created": origin.created.isoformat(),
            "base": origin.base,
        }
        write_durably(path / JOB, json.dumps(stored, indent=1).encode())
        return cls(path, origin, export)

    @classmethod
    def reopen(cls, path: Path, origin: Origin, export: Export) -> TaskFolder:
        """Continue the run in `path`; `origin.job` replaces the stored job, which the caller has compared."""
        found = read_origin(path)
        folder = cls(path, Origin(origin.job, found.created, found.base), export)
        stored = {
            "job": origin.job.model_dump(mode="json"),
            "created": found.created.isoformat(),
            "base": found.base,
        }
        write_durably(path / JOB, json.dumps(stored, indent=1).encode())
        return folder

    def restore(self, task: Task) -> int:
        """Put a fresh task at the newest whole checkpoint and cut the metrics back to it; the step it stands at."""
        found = checkpoint.newest(self.path / CHECKPOINTS)
        if found is not None:
            checkpoint.restore(task, found, base=self.origin.base)
        self._metrics.cut(task.step)
        return task.step

    def record(self, event: RunEvent) -> None:
        """Write an event where it belongs: metrics, or events and status."""
        if isinstance(event, StepResult):
            self._metrics.append(step_row(event))
        elif isinstance(event, EvalResult):
            self._metrics.append(eval_row(event))
        else:
            self._note(event)

    def checkpoint(self, task: Task) -> str:
        keep = self.origin.job.save_total_limit
        return str(checkpoint.save(self.path / CHECKPOINTS, task, base=self.origin.base, keep=keep))

    def complete(self, task: Task) -> str:
        self._export(task, self.path)
        return str(self.path)

    def _note(self, event: TaskEvent) -> None:
        line = {"kind": event.kind, "step": event.step, "message": event.message, **event.data}
        with open(self.path / EVENTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        status = {"started": "running", "resumed": "running"}.get(event.kind, event.kind)
        if status in ("running", "paused", "completed", "failed", "cancelled"):
            found = {"status": status, "step": event.step, "message": event.message}
            write_durably(self.path / STATUS, json.dumps(found, indent=1).encode())


def holds_run(path: Path) -> bool:
    """Whether `path` is a folder that a run has written to."""
    return (path / JOB).exists()


def status_of(path: Path) -> str:
    """The status a run's folder records, `queued` where it has none yet."""
    try:
        return str(json.loads((path / STATUS).read_text(encoding="utf-8"))["status"])
    except FileNotFoundError:
        return "queued"


def read_origin(path: Path) -> Origin:
    """Raises CheckpointError where `path` holds no readable job."""
    try:
        stored = json.loads((path / JOB).read_text(encoding="utf-8"))
        job = JobSpec.model_validate(stored["job"])
        return Origin(job, datetime.fromisoformat(stored["created"]), stored["base"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot read the job of this run: {error}", where=str(path / JOB), hint="start over with --overwrite"
        ) from None


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The newest whole checkpoint of the run in `path`."""
    return checkpoint.newest(path / CHECKPOINTS)
