"""`muxtune.train`: a whole config file from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from muxtune.engine.arguments import as_path
from muxtune.engine.task_folder import status_of
from muxtune.engine.training import TrainingRun
from muxtune.spec.event import RunEvent
from muxtune.spec.load import load_run
from muxtune.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one job ended: `completed`, `failed`, or what else its folder's status says."""

    name: str
    status: str
    adapter_dir: Path


def train(
    config: str | os.PathLike[str] | RunSpec,
    *,
    sets: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    keep_going: bool = False,
    on_event: Callable[[RunEvent], None] | None = None,
) -> dict[str, RunResult]:
    """Train every job of a config file (or a RunSpec) and answer how each ended, by name.

    Raises MuxTuneError for whatever is wrong before anything trains; a job that fails later is in the answer.
    """
    if isinstance(config, RunSpec):
        training = TrainingRun(config, resume=resume, overwrite=overwrite, keep_going=keep_going)
    else:
        found = load_run(as_path(config, "config"), sets)
        training = TrainingRun(
            found.run, resume=resume, overwrite=overwrite, keep_going=keep_going, locate=found.locate
        )
    run = training.run
    for event in training.events():
        if on_event is not None:
            on_event(event)
    failed = {failure.job.name for failure in training.failures}
    folders = {job.name: Path(run.output_dir) / job.name for job in run.jobs}
    return {
        name: RunResult(name, "failed" if name in failed else status_of(folder), folder)
        for name, folder in folders.items()
    }
