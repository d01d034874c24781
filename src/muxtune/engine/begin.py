"""How each job of a run begins, from what its folder holds: new, continued, finished already, or in the way.

Reads names, JSON and one hash a finished adapter, never a checkpoint's tensors; touches nothing. A folder is believed
to be finished only where its status can be read and its adapter is whole: anything else goes on from the newest
checkpoint, which makes both again, and says so. What no checkpoint can make again is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from muxtune.engine import checkpoint
from muxtune.engine.metrics import STEP, MetricsFiles, Row
from muxtune.engine.task_folder import CHECKPOINTS, Standing, adapter_damage, holds_run, read_origin, standing_of
from muxtune.errors import CheckpointError, MuxTuneError, StateError
from muxtune.models.backbone import BlockName
from muxtune.models.cache import file_sha256
from muxtune.spec.job import JobSpec
from muxtune.spec.resume import check_resume
from muxtune.spec.status import JobStatus

Begin = Literal["new", "continue", "finished"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come that goes on, or has ended, by its files: steps that are kept, and the losses there."""

    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None

    def told(self) -> dict[str, object]:
        """For an event: the losses that are known."""
        losses = {"loss": self.loss, "eval_loss": self.eval_loss}
        return {key: value for key, value in losses.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """How a job begins, and when it was (first) created. `warnings`: what of its folder is not as it was left."""

    job: JobSpec
    folder: Path
    begin: Begin
    created: datetime
    base: str | None = None  # hash of the base weights it has trained on, where it has begun
    block: BlockName | None = None  # that has run its layers, where it has begun
    progress: Progress = Progress()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that could not begin, or go on after `step` steps."""

    job: JobSpec
    error: MuxTuneError
    step: int = 0

    @property
    def named(self) -> MuxTuneError:
        """The error, saying whose it is; those of folders do, which are named after their jobs, and those of many jobs
        at once are nobody's own."""
        error, job = self.error, f"jobs.{self.job.name}"
        where = error.where or ""
        if isinstance(error, StateError | CheckpointError) or job in where or repr(self.job.name) in error.message:
            return error
        if where == "jobs":
            return error
        named = copy.copy(error)
        named.where = f"{job}.{where}" if where in JobSpec.model_fields else ": ".join(filter(None, (job, where)))
        return named

    @property
    def told(self) -> str:
        """For an event: what and where. The error's full text may clip an example."""
        return f"{self.error.where}: {self.error.message}" if self.error.where else self.error.message


class FileHashes:
    """SHA-256 of files, each hashed once for as long as it is the same file: a run plans its jobs before the base model
    is resolved, and once more when nobody else can write into its folders."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int, int, int, int], str] = {}

    def __call__(self, path: Path) -> str:
        """Hash of the file. Files are replaced, not written over (`muxtune.durable`): another one is another inode."""
        now = path.stat()
        key = (path, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if key not in self._known:
            self._known[key] = file_sha256(path)
        return self._known[key]


def plan_job(
    job: JobSpec, folder: Path, now: datetime, sha256: Callable[[Path], str], *, resume: bool, overwrite: bool
) -> PlannedJob:
    """Raises StateError for a folder in the way, ConfigError for a changed job, CheckpointError where what is left of
    its run is not enough to go on from."""
    if not holds_run(folder) or overwrite:
        return PlannedJob(job, folder, "new", now)
    if not resume:
        raise StateError(
            "this folder holds a run already", where=str(folder), hint="continue it with --resume, or --overwrite"
        )
    origin = read_origin(folder)
    check_resume(origin.job, job, same_data=True)
    longer = (origin.job.max_steps, origin.job.num_train_epochs) != (job.max_steps, job.num_train_epochs)
    standing, newest = standing_of(folder), checkpoint.latest_step(folder / CHECKPOINTS)
    finished = standing.status is JobStatus.COMPLETED and not longer
    damage = standing.damage or (adapter_damage(folder, standing, sha256) if finished else None)
    if damage is None and finished:
        progress = _progress(_rows(folder), standing.step)
        return PlannedJob(job, folder, "finished", origin.created, origin.base, origin.block, progress)
    if damage is not None and newest is None:
        raise CheckpointError(
            f"{damage}, and no checkpoint is left to make it again from",
            where=str(folder),
            hint="put the file back, or start over with --overwrite",
        )
    rows = _rows(folder)
    warnings = [f"{damage}: it is made again from the newest checkpoint"] if damage is not None else []
    if newest is None and (done := _steps_done(rows, standing)):
        warnings.append(f"none of its checkpoints is left: it starts again at step 0, though {done} steps were done")
    return PlannedJob(
        job,
        folder,
        "continue",
        origin.created,
        origin.base,
        origin.block,
        _progress(rows, newest or 0),
        tuple(warnings),
    )


def _rows(folder: Path) -> Sequence[Row]:
    try:
        return MetricsFiles(folder).rows()
    except OSError:  # what they say is only shown
        return ()


def _steps_done(rows: Sequence[Row], standing: Standing) -> int:
    return max([standing.step, *(int(row[STEP] or 0) for row in rows)])


def _progress(rows: Sequence[Row], step: int) -> Progress:
    """With the last losses up to `step`, as far as they are numbers."""

    def last(column: str) -> float | None:
        values = [row[column] for row in rows if column in row and int(row[STEP] or 0) <= step]
        return float(values[-1]) if values and isinstance(values[-1], int | float) else None

    return Progress(step, last("train/loss"), last("eval/loss"))
