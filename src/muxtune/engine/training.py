"""One run of a config file: every job checked first, then trained together, each into a folder of its own.

    plan      each job's folder is new, continued, finished already, or in the way (`muxtune.engine.begin`)
    prepare   all data is read and tokenised; nothing has been loaded or written yet
    admit     what cannot fit into memory is refused, with the numbers
    start     the backbone is loaded, every job attached, then the folders are made
    events    the round loop

A job that is wrong stops the run before anything trains - or, with `keep_going`, fails alone. The command line and
`muxtune.train` are two callers of this.

Resuming takes each unfinished job up at its newest whole checkpoint: bit for bit what an undisturbed run would have
done, on the same machine with as many threads. One that has failed is tried once more from there, since the cause may
have been the machine's; where it was the job's own (its loss turned NaN) it fails again as it did, alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from muxtune.data.prepare import PreparedJob, Preparer
from muxtune.durable import discard, make_folder, sweep, try_folder
from muxtune.engine import checkpoint
from muxtune.engine.adapters import require_adapter
from muxtune.engine.admission import Admission, JobSize, admit
from muxtune.engine.begin import Failure, PlannedJob, plan_job
from muxtune.engine.checkpoint import Ground
from muxtune.engine.load import choose_device, choose_dtype
from muxtune.engine.local import LocalEngine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Task
from muxtune.engine.task_folder import CHECKPOINTS, Origin, TaskFolder, load_checkpoint
from muxtune.engine.trace_file import TraceFile
from muxtune.errors import AdapterError, CheckpointError, ConfigError, MuxTuneError, StateError
from muxtune.models.cache import default_cache_dir
from muxtune.models.memory import footprint, memory_here
from muxtune.models.sources import ModelFolder, resolve
from muxtune.spec.event import RunEvent, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.run import RunSpec

LOCK = ".muxtune.lock"
_RECOMPUTED = "memory is too small to keep activations: they are computed twice, which takes about 40 % longer"


@dataclass(frozen=True, slots=True)
class _Started:
    """An attached task, at its newest checkpoint if it has one; `passed_over` says which newer ones are damaged."""

    plan: PlannedJob
    prepared: PreparedJob
    size: JobSize
    task: Task
    ground: Ground
    passed_over: tuple[str, ...]


@dataclass(slots=True)
class TrainingRun:
    """Args:
    resume, overwrite: what to do with folders that hold a run; without either they are refused.
    keep_going: let a job with bad data or settings fail alone.
    stop: asked at each round; true checkpoints every task and ends the run.
    num_hidden_layers: cut the base model, for fast checks.
    locate: tells a job's error where in a file its key was given (ResolvedRun.locate).
    """

    run: RunSpec
    resume: bool = False
    overwrite: bool = False
    keep_going: bool = False
    stop: Callable[[], bool] = lambda: False
    cache_dir: Path | None = None
    num_hidden_layers: int | None = None
    locate: Callable[[MuxTuneError], None] = lambda error: None
    failures: list[Failure] = field(default_factory=list)  # jobs that could not begin; set while `events` runs

    def plan(self) -> tuple[list[PlannedJob], list[Failure]]:
        """How each job begins; touches nothing.

        Raises StateError for a folder in the way. ConfigError for a changed job and CheckpointError for a folder that
        nothing can go on from are failures of that job where `keep_going`, and are raised otherwise.
        """
        now = datetime.now(UTC)
        planned: list[PlannedJob] = []
        failures: list[Failure] = []
        for job in self.run.jobs:
            folder = Path(self.run.output_dir) / job.name
            try:
                planned.append(plan_job(job, folder, now, resume=self.resume, overwrite=self.overwrite))
            except (ConfigError, CheckpointError) as error:
                failures.append(Failure(job, error, checkpoint.latest_step(folder / CHECKPOINTS) or 0))
        if failures and not self.keep_going:
            raise _first_of(failures)
        return planned, failures

    def base(self) -> ModelFolder:
        return resolve(self.run.base_model, cache_dir=self._cache)

    def check_output(self) -> None:
        """Raises ConfigError where the output folder cannot be made or written into; leaves nothing there."""
        folder = Path(self.run.output_dir)
        try:
            try_folder(folder)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def prepare(self, planned: list[PlannedJob], base: ModelFolder) -> tuple[list[PreparedJob], list[Failure]]:
        """Read all data of the jobs that are not finished, and see that their `adapter_path` is an adapter's folder.

        Raises the first error unless `keep_going`.
        Whatever that says, ConfigError where a job has trained on other base weights.
        """
        _check_base(planned, base)
        preparer = Preparer(base.path, cache_dir=self._cache / "tokens")
        prepared: list[PreparedJob] = []
        failures: list[Failure] = []
        for plan in planned:
            if plan.begin == "finished":
                continue
            try:
                _check_start(plan.job)
                prepared.append(preparer.prepare(plan.job, created=plan.created))
            except MuxTuneError as error:
                self.locate(error)
                failures.append(Failure(plan.job, error, plan.progress.step))
        if failures and not self.keep_going:
            raise _first_of(failures)
        return prepared, failures

    def events(self) -> Iterator[RunEvent]:
        """The whole run. Raises MuxTuneError for what is wrong before anything trains."""
        with ExitStack() as stack:
            self.plan()  # what is in the way is said before a model is downloaded or converted
            base = self.base()
            stack.enter_context(self._locked())
            planned, refused = self.plan()
            prepared, failures = self.prepare(planned, base)
            yield from self._fail([*refused, *failures])
            for plan in planned:
                if plan.begin == "finished":
                    yield _finished(plan)
            if prepared:
                yield from self._train({plan.job.name: plan for plan in planned}, prepared, base)

    def admit(self, prepared: list[PreparedJob], base: ModelFolder) -> Admission:
        """What the jobs need of memory, and who is refused. Raises the first refusal unless `keep_going`."""
        device = choose_device(self.run.device)
        dtype = choose_dtype(self.run.dtype, device)
        used, free = memory_here(device)
        limit = min(self.run.memory_limit or used + free, used + free)
        model = footprint(base.path, dtype)
        admission = admit(
            prepared,
            model,
            dtype=dtype,
            limit_bytes=limit,
            process_bytes=used,
            memory_limit=self.run.memory_limit,
        )
        for _, error in admission.refused:
            self.locate(error)
        if admission.refused and not self.keep_going:
            raise _first_of([Failure(job, error) for job, error in admission.refusals])
        return admission

    def _train(
        self, plans: dict[str, PlannedJob], prepared: list[PreparedJob], base: ModelFolder
    ) -> Iterator[RunEvent]:
        run = self.run
        admission = self.admit(prepared, base)
        yield from self._fail([Failure(job, error, plans[job.name].progress.step) for job, error in admission.refused])
        admitted = {size.job.name: size for size in admission.sizes}
        if not admitted:
            return
        engine = LocalEngine(
            base,
            device=run.device,
            dtype=run.dtype,
            threads=run.threads,
            policy=run.policy,
            fuse_tokens=admission.fuse_tokens,
            recompute=admission.model.recompute,
            keep_tokens=admission.keep_tokens,
            num_hidden_layers=self.num_hidden_layers,
            cache_dir=self._cache,
        )
        failures: list[Failure] = []
        started: list[_Started] = []
        for job in prepared:
            if job.job.name not in admitted:
                continue
            try:
                started.append(_start(engine, plans[job.job.name], job, admitted[job.job.name]))
            except MuxTuneError as error:
                failures.append(Failure(job.job, error, plans[job.job.name].progress.step))
        if failures and not self.keep_going:
            raise _first_of(failures)
        folders, unopened = self._open(started, engine)
        yield from self._fail([*failures, *unopened])
        for one in started:
            if one.task.name not in folders:
                continue
            for event in _opening(one, recompute=admission.model.recompute):
                folders[one.task.name].record(event)
                yield event

        def sample(task: Task) -> list[tuple[str, str]]:
            prompts = task.job.sample_prompts
            return list(zip(prompts, engine.generate([(task, prompt) for prompt in prompts]), strict=True))

        with TraceFile.begin(Path(run.output_dir)) as trace:
            runner = Runner(engine, folders=folders, stop=self.stop, sampler=sample, trace=trace.append)
            yield from runner.run()

    def _fail(self, failures: list[Failure]) -> Iterator[TaskEvent]:
        self.failures += failures
        for failure in failures:
            yield TaskEvent("failed", failure.job.name, failure.step, failure.told, {"code": failure.error.code})

    def _open(self, started: Sequence[_Started], engine: LocalEngine) -> tuple[dict[str, TaskFolder], list[Failure]]:
        """The folders to train into: what is overwritten goes, all of it first, then folders are made or reopened.

        Where one cannot be and `keep_going`, its task is detached.
        """

        if self.overwrite:
            for one in started:
                discard(one.plan.folder)
        folders: dict[str, TaskFolder] = {}
        failures: list[Failure] = []
        for one in started:
            plan, task = one.plan, one.task
            origin = Origin(plan.job, plan.created, one.ground.base, self.run.base_model)
            try:
                if plan.begin == "continue":
                    folders[task.name] = TaskFolder.reopen(
                        plan.folder, origin, one.ground, engine.export, step=task.step
                    )
                else:
                    folders[task.name] = TaskFolder.create(plan.folder, origin, one.ground, engine.export)
            except MuxTuneError as error:
                if not self.keep_going:
                    raise
                engine.detach(task)
                failures.append(Failure(plan.job, error, task.step))
        return folders, failures

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two processes never write to one output folder. The lock is the kernel's: a killed process has none."""
        folder = Path(self.run.output_dir)
        try:
            make_folder(folder)
            lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
            lock.acquire()
        except Timeout:
            raise StateError(
                "another process is training into this folder",
                where=str(folder),
                hint="wait until it has ended, or choose another output_dir",
            ) from None
        except OSError as error:
            raise _unwritable(folder, error) from None
        try:
            sweep(folder)
            yield
        finally:
            lock.release()

    @property
    def _cache(self) -> Path:
        return self.cache_dir or default_cache_dir()


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot be written: {folder}: {error.strerror}",
        where="output_dir",
        hint="choose another folder, or mend what is in its way",
    )


def _check_start(job: JobSpec) -> None:
    """Raises AdapterError where `adapter_path` is no adapter's folder; whether it fits the job shows at `attach`."""
    if job.adapter_path is None:
        return
    try:
        require_adapter(Path(job.adapter_path))
    except AdapterError as error:
        where = f"jobs.{job.name}.adapter_path: {error.where}"
        raise AdapterError(error.message, where=where, hint=error.hint) from None


def _start(engine: LocalEngine, plan: PlannedJob, prepared: PreparedJob, size: JobSize) -> _Started:
    """Attach the job and put it where its newest whole checkpoint left off; writes nothing.

    Raises what `attach` raises, CheckpointError, and ConfigError where it has begun with larger chunks than fit now;
    the task is not attached then.
    """
    task = engine.attach(plan.job, prepared, chunk_tokens=size.chunk_tokens)
    try:
        ground = Ground(engine.base.weights_sha256, str(engine.backbone.dtype).removeprefix("torch."), _begins_at(task))
        found = load_checkpoint(plan.folder) if plan.begin == "continue" else None
        if found is not None:
            checkpoint.restore(task, found, ground)
            _check_chunks(task, size)
    except MuxTuneError:
        engine.detach(task)
        raise
    return _Started(plan, prepared, size, task, ground, found.passed_over if found is not None else ())


def _check_chunks(task: Task, size: JobSize) -> None:
    if task.chunk_tokens > size.chunk_tokens:
        raise ConfigError(
            f"job {task.name!r} has begun with chunks of {task.chunk_tokens} tokens, which its results depend on; "
            f"there is room for {size.chunk_tokens}",
            where="memory_limit",
            hint="give it as much memory as it began with, or start over with --overwrite",
        )


def _finished(plan: PlannedJob) -> TaskEvent:
    step = plan.progress.step
    data = {"earlier": True, "total_steps": step, **plan.progress.told()}
    return TaskEvent("completed", plan.job.name, step, str(plan.folder), data)


def _opening(one: _Started, *, recompute: bool) -> Iterator[TaskEvent]:
    """What is known of a task before its first round: its size, and what the user may not have wanted."""
    task = one.task
    known = one.plan.progress.told() if task.step == one.plan.progress.step else {}
    yield TaskEvent("queued", task.name, task.step, data={"total_steps": task.total_steps, **known})
    for warning in one.plan.warnings:
        yield TaskEvent("warning", task.name, task.step, warning)
    for reason in one.passed_over:
        yield TaskEvent("warning", task.name, task.step, f"passed over {reason}")
    recomputed = _RECOMPUTED if recompute else None
    for warning in (*filter(None, [recomputed, one.size.warning]), *one.prepared.warnings):
        yield TaskEvent("warning", task.name, task.step, warning)


def _begins_at(task: Task) -> str:
    """The hash of a fresh task's state where it comes from a folder; others follow from the seed."""
    if task.job.adapter_path is None:
        return ""
    digest = hashlib.sha256()
    for tensor in task.adapter.state().values():
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _check_base(planned: list[PlannedJob], base: ModelFolder) -> None:
    """Raises ConfigError where a job, finished or not, has trained on other weights than the run now names."""
    for plan in planned:
        if plan.base is not None and plan.base != base.weights_sha256:
            raise ConfigError(
                f"job {plan.job.name!r} was trained on other base weights, sha256 {plan.base[:12]}...; "
                f"those of {base.name!r} are {base.weights_sha256[:12]}...",
                where="base_model",
                hint="use the base model of that run, or start over with --overwrite",
            )


def _first_of(failures: list[Failure]) -> MuxTuneError:
    """The one error, or one that tells all of them."""
    first = failures[0].named
    if len(failures) == 1:
        return first
    told = "\n".join(str(failure.named) for failure in failures)
    kinds: Iterator[type[MuxTuneError]] = (one for one in type(first).__mro__ if one.__module__ == "muxtune.errors")
    return next(kinds)(f"{len(failures)} jobs cannot start\n{told}", hint="nothing was trained; or use --keep-going")
