"""How an admitted job becomes a task: attached, put where its newest whole checkpoint left off, and announced.

A job that has to wait goes through the same beforehand and is detached again (`check`), so that what is wrong with it
is known before anything trains. That takes milliseconds, but for PiSSA's decompositions: a job that begins afresh with
the `peft` of another is not attached for it.

The boundary: engine and values; a job's folder is only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from muxtune.data.prepare import PreparedJob
from muxtune.engine import checkpoint
from muxtune.engine.admission import JobSize
from muxtune.engine.begin import PlannedJob
from muxtune.engine.checkpoint import Checkpoint, Ground
from muxtune.engine.local import LocalEngine
from muxtune.engine.task import Sequences, Task
from muxtune.engine.task_folder import load_checkpoint
from muxtune.errors import CheckpointError, ConfigError
from muxtune.spec.event import TaskEvent
from muxtune.spec.schedule import total_steps

_RECOMPUTED = "memory is too small to keep activations: they are computed twice, which takes about 40 % longer"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job that memory suffices for, and what its task is made from."""

    plan: PlannedJob
    prepared: PreparedJob
    size: JobSize

    @property
    def name(self) -> str:
        return self.plan.job.name


@dataclass(frozen=True, slots=True)
class Ready:
    """An admitted job that starts, or is known to: on what ground and after how many steps. `passed_over` says which
    newer checkpoints are damaged."""

    job: Admitted
    ground: Ground
    step: int
    total_steps: int
    passed_over: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.job.name


def start(engine: LocalEngine, job: Admitted) -> Ready:
    """Attach the job and put it where its newest whole checkpoint left off; writes nothing.

    Raises what `attach` raises, CheckpointError, and ConfigError where it has begun with larger chunks than fit now;
    the task is not attached then.
    """
    plan, size = job.plan, job.size
    task = engine.attach(plan.job, job.prepared, chunk_tokens=size.chunk_tokens)
    try:
        found = load_checkpoint(plan.folder) if plan.begin == "continue" else None
        ground = _ground(engine, _begins_at(task), found)
        if found is not None:
            checkpoint.restore(task, found, ground)
            _check_chunks(task, size)
    except BaseException:
        engine.detach(task)
        raise
    return Ready(job, ground, task.step, task.total_steps, found.passed_over if found is not None else ())


def check(engine: LocalEngine, job: Admitted, fitting: set[str]) -> Ready:
    """What `start` will come to, and raises; nothing stays attached.

    Args:
        fitting: the `peft` of jobs that are attached before anything trains, as JSON; grows.
    """
    spec = job.plan.job
    peft, afresh = spec.peft.model_dump_json(), spec.adapter_path is None and job.plan.begin == "new"
    if afresh and peft in fitting:
        data = job.prepared.data
        engine.check(spec, Sequences(data.train, data.validation))
        return Ready(job, _ground(engine, "", None), 0, total_steps(spec, data.groups))
    found = start(engine, job)
    engine.detach(job.name)
    fitting.add(peft)
    return found


def start_as_checked(engine: LocalEngine, checked: Ready) -> Ready:
    """`start` a job that was checked earlier. Raises CheckpointError, too, where what it starts from has changed since:
    its folder has been opened for that."""
    found = start(engine, checked.job)
    if (found.ground, found.step) == (checked.ground, checked.step):
        return found
    engine.detach(found.name)
    raise CheckpointError(
        "what this job starts from, its checkpoint or the folder of adapter_path, has changed while it waited",
        where=str(checked.job.plan.folder),
        hint="continue it with --resume once that is as it should be",
    )


def opening(one: Ready, *, recompute: bool) -> Iterator[TaskEvent]:
    """What is known of a task before its first round: its size, and what the user may not have wanted."""
    name, job = one.name, one.job
    yield queued(one)
    for warning in job.plan.warnings:
        yield TaskEvent("warning", name, one.step, warning)
    for reason in one.passed_over:
        yield TaskEvent("warning", name, one.step, f"passed over {reason}")
    recomputed = _RECOMPUTED if recompute else None
    for warning in (*filter(None, [recomputed, job.size.warning]), *job.prepared.warnings):
        yield TaskEvent("warning", name, one.step, warning)


def queued(one: Ready, message: str = "", **more: object) -> TaskEvent:
    """The event of a job that is there, with its size and what an earlier process has come to."""
    known = one.job.plan.progress.told() if one.step == one.job.plan.progress.step else {}
    return TaskEvent("queued", one.name, one.step, message, {"total_steps": one.total_steps, **known, **more})


def _ground(engine: LocalEngine, begins_at: str, found: Checkpoint | None) -> Ground:
    """Ranks that hold a model together go on with what any block began, and keep its name: their results equal those
    of one device within rounding, whatever it ran."""
    backbone = engine.backbone
    dtype = str(backbone.dtype).removeprefix("torch.")
    block = backbone.block
    if found is not None and engine.backbone is not engine.view:
        block = found.state.ground.block
    return Ground(engine.base.weights_sha256, dtype, begins_at, block)


def _begins_at(task: Task) -> str:
    """The hash of a fresh task's state where it comes from a folder; others follow from the seed."""
    if task.job.adapter_path is None:
        return ""
    digest = hashlib.sha256()
    for tensor in task.whole.state().values():
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _check_chunks(task: Task, size: JobSize) -> None:
    if task.chunk_tokens > size.chunk_tokens:
        raise ConfigError(
            f"job {task.name!r} has begun with chunks of {task.chunk_tokens} tokens, which its results depend on; "
            f"there is room for {size.chunk_tokens}",
            where="memory_limit",
            hint="give it as much memory as it began with, or start over with --overwrite",
        )
