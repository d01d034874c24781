"""The folder of one task: its job, status, metrics, events, checkpoints and, in the end, its adapter.

    NAME/job.json         the job, when it was created, and what it was trained on; there from the start
    NAME/status.json      where it stands, and once it is completed what its adapter is made of; replaced whole at each
                          change
    NAME/metrics.jsonl, metrics.csv, events.jsonl
    NAME/samples.jsonl    replies to the job's sample_prompts, by step
    NAME/checkpoints/     muxtune.engine.checkpoint
    NAME/adapter_config.json, adapter_model.safetensors, ...    peft's format, when it is completed

A folder that holds a run is never written over: `create` refuses, `reopen` continues it. A process may die at any
moment: files are replaced whole or appended to, and `reopen` cuts off what was written beyond the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from safetensors import SafetensorError

from muxtune.durable import is_staged, make_folder, sweep, write_durably
from muxtune.engine import checkpoint
from muxtune.engine.checkpoint import Checkpoint, Ground
from muxtune.engine.metrics import MetricsFiles, columns_of, eval_row, step_row
from muxtune.engine.samples import SamplesFile
from muxtune.engine.task import Task
from muxtune.errors import AdapterError, CheckpointError, StateError
from muxtune.models.backbone import BlockName, block_named
from muxtune.models.cache import file_sha256
from muxtune.peft.folder import ADAPTER_FILES, CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE
from muxtune.peft.untrusted import SafetensorsFile, read_json
from muxtune.spec.event import EvalResult, RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.status import JobStatus

JOB, STATUS, EVENTS, CHECKPOINTS = "job.json", "status.json", "events.jsonl", "checkpoints"
Export = Callable[[Task, Path], None]
_STATUSES = frozenset(JobStatus)


@dataclass(frozen=True, slots=True)
class Origin:
    """What `job.json` holds: the job as it began, when, on which base weights (their hash, and the run's name), and
    with which block."""

    job: JobSpec
    created: datetime
    base: str
    base_model: str = ""
    block: BlockName = "transformers"


@dataclass(frozen=True, slots=True)
class Standing:
    """What `status.json` says; `damage` why it cannot be read. `files` are those of the completed adapter, and
    `weights` is the hash of its tensors: none and empty where they were not noted."""

    status: JobStatus = JobStatus.QUEUED
    step: int = 0
    files: tuple[str, ...] = ()
    weights: str = ""
    damage: str | None = None


class TaskFolder:
    """Made by `create` or `reopen`. Whoever has it is the only writer (`muxtune.engine.training` holds a lock).

    Its methods raise CheckpointError where the disk refuses; what was whole on disk stays whole.
    """

    def __init__(self, path: Path, job: JobSpec, ground: Ground, export: Export) -> None:
        self.path = path
        self._job = job
        self._ground = ground
        self._export = export
        self._metrics = MetricsFiles(path, columns_of(job.method))
        self._samples = SamplesFile(path)

    @classmethod
    def create(cls, path: Path, origin: Origin, ground: Ground, export: Export) -> TaskFolder:
        """Begin a run. `export` writes the finished adapter into a folder.

        Raises StateError where the folder holds anything already.
        """
        if holds_run(path):
            raise StateError(
                "this folder holds a run already", where=str(path), hint="continue it with --resume, or --overwrite"
            )
        with _writing(path):
            make_folder(path)
            sweep(path)
            _write_origin(path, origin)
        return cls(path, origin.job, ground, export)

    @classmethod
    def reopen(cls, path: Path, origin: Origin, ground: Ground, export: Export, *, step: int) -> TaskFolder:
        """Continue the run in `path` after `step` steps, as the job of `origin`, which the caller has compared.

        What was written beyond that step is cut off. The status goes first: a job that may take more steps than before
        must not be found completed.
        """
        folder = cls(path, origin.job, ground, export)
        with _writing(path):
            sweep(path)
            sweep(path / CHECKPOINTS)
            folder._set_status("queued", step)
            _write_origin(path, origin)
            checkpoint.cut(path / CHECKPOINTS, step)
            folder._metrics.cut(step)
            folder._samples.cut(step)
            _cut_half_line(path / EVENTS)
        return folder

    def record(self, event: RunEvent) -> None:
        """Write an event of this task where it belongs: metrics, samples, or the log of events and the status."""
        with _writing(self.path):
            if isinstance(event, StepResult):
                self._metrics.append(step_row(event))
            elif isinstance(event, EvalResult):
                self._metrics.append(eval_row(event))
            elif event.kind == "sample":
                self._samples.append(event)
            else:
                self._note(event)

    def checkpoint(self, task: Task) -> str:
        """Save the task as it stands, after all that was recorded of it; the checkpoint's path."""
        with _writing(self.path):
            self._metrics.sync()
            self._samples.sync()
            keep = self._job.save_total_limit
            return str(checkpoint.save(self.path / CHECKPOINTS, task, self._ground, keep=keep))

    def complete(self, task: Task) -> str:
        with _writing(self.path):
            self._export(task, self.path)
        return str(self.path)

    def _note(self, event: TaskEvent) -> None:
        line = {"kind": event.kind, "step": event.step, "message": event.message, **event.data}
        with open(self.path / EVENTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        status = {"started": "running", "resumed": "running"}.get(event.kind, event.kind)
        if status in _STATUSES:
            self._set_status(status, event.step, event.message)

    def _set_status(self, status: str, step: int, message: str = "") -> None:
        found: dict[str, object] = {"status": status, "step": step, "message": message}
        if status == JobStatus.COMPLETED:
            found |= _adapter_record(self.path)
        write_durably(self.path / STATUS, json.dumps(found, indent=1).encode())


def holds_run(path: Path) -> bool:
    """Whether there is anything at `path` that training there would overwrite: a run, or whatever else."""
    try:
        return any(not is_staged(entry) for entry in path.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return path.exists()  # a file; false where a folder above it is one


def status_of(path: Path) -> str:
    """The status a run's folder records; `queued` where it has none yet, or one that cannot be read."""
    return str(standing_of(path).status)


def standing_of(path: Path) -> Standing:
    """What the run's `status.json` says, which anything may have happened to."""
    file = path / STATUS
    if not file.exists() and not file.is_symlink():
        return Standing()
    try:
        found = read_json(file)
        status, step = JobStatus(str(found["status"])), found.get("step")
        files, weights = found.get("files"), found.get("weights")
    except AdapterError as error:
        return Standing(damage=f"{STATUS} is damaged ({error.message})")
    except (KeyError, ValueError):
        return Standing(damage=f"{STATUS} is damaged (it names no status)")
    return Standing(
        status,
        step if type(step) is int and step >= 0 else 0,
        tuple(map(str, files)) if isinstance(files, list) else (),
        weights if isinstance(weights, str) else "",
    )


def adapter_damage(path: Path, standing: Standing, sha256: Callable[[Path], str] = file_sha256) -> str | None:
    """What is wrong with the adapter of a completed run, None where it is whole.

    Its files are all there, its JSON is JSON, and its tensors are those that were written; what of the text in them has
    been edited since is its owner's business.
    """
    for name in dict.fromkeys((WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE, *standing.files)):
        if name not in ADAPTER_FILES or not (path / name).exists():
            return f"{name} is missing"
    try:
        for name in (CONFIG_FILE, MANIFEST_FILE):
            read_json(path / name)
        with SafetensorsFile(path / WEIGHTS_FILE):
            pass
    except AdapterError as error:
        return f"{Path(error.where or name).name} is damaged ({error.message})"
    if standing.weights and standing.weights != sha256(path / WEIGHTS_FILE):
        return f"{WEIGHTS_FILE} is damaged (it is not what was written)"
    return None


def read_origin(path: Path) -> Origin:
    """Raises CheckpointError where `path` holds no readable job."""
    try:
        stored = json.loads((path / JOB).read_text(encoding="utf-8"))
        job = JobSpec.model_validate(stored["job"])
        created = datetime.fromisoformat(stored["created"])
        block = block_named(stored.get("block", "transformers"))  # the only one, once
        return Origin(job, created, stored["base"], str(stored.get("base_model", "")), block)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read the job of this run: {error}", where=str(path / JOB), hint="start over with --overwrite"
        ) from None


def _write_origin(path: Path, origin: Origin) -> None:
    stored = {
        "job": origin.job.model_dump(mode="json"),
        "created": origin.created.isoformat(),
        "base": origin.base,
        "base_model": origin.base_model,
        "block": origin.block,
    }
    write_durably(path / JOB, json.dumps(stored, indent=1).encode())


def _adapter_record(path: Path) -> Mapping[str, object]:
    """The files of the adapter in `path`, and the hash of its tensors: none where it is not there."""
    files = [name for name in ADAPTER_FILES if (path / name).is_file()]
    return {"files": files, "weights": file_sha256(path / WEIGHTS_FILE)} if WEIGHTS_FILE in files else {}


def _cut_half_line(path: Path) -> None:
    """Drop a last line that a killed process did not end: the next one would be written onto it."""
    if path.exists():
        whole, _, half = path.read_bytes().rpartition(b"\n")
        if half:
            write_durably(path, whole + b"\n" if whole else b"")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"this run's folder cannot be written: {error}",
            where=str(path),
            hint="free some space or mend its permissions, then continue with --resume",
        ) from error


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The newest whole checkpoint of the run in `path`."""
    return checkpoint.newest(path / CHECKPOINTS)
