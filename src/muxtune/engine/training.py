"""One run of a config file: every job checked first, then trained together, each into a folder of its own.

    plan      each job's folder is new, continued, finished already, or in the way (`muxtune.engine.begin`)
    prepare   all data is read and tokenised; nothing has been loaded or written yet
    admit     what cannot fit into memory is refused, with the numbers; what does not fit beside the others will wait
    start     the backbone is loaded, every job attached - one that waits only to see that it can be -, then the folders
              are made
    events    the round loop, which starts those that wait as others end (`muxtune.engine.waves`)

Every job has its folder from the start: one that waits is there as one is that stopped before its first step, so a
second run refuses it, `--resume` goes on with it and `--overwrite` removes it, whenever the process ends.

A job that is wrong stops the run before anything trains - or, with `keep_going`, fails alone. The command line and
`muxtune.train` are two callers of this.

Resuming takes each unfinished job up at its newest whole checkpoint: bit for bit what an undisturbed run would have
done, on the same machine with as many threads. One that has failed is tried once more from there, since the cause may
have been the machine's; where it was the job's own (its loss turned NaN) it fails again as it did, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from muxtune.data.prepare import PreparedJob, Preparer
from muxtune.durable import discard, make_folder, sweep, try_folder
from muxtune.engine import checkpoint
from muxtune.engine.adapters import require_adapter
from muxtune.engine.admission import Admission, admit
from muxtune.engine.begin import Failure, FileHashes, PlannedJob, plan_job
from muxtune.engine.load import choose_device, choose_dtype
from muxtune.engine.local import LocalEngine
from muxtune.engine.profile_cache import find_table
from muxtune.engine.profiler import measuring_bytes
from muxtune.engine.ranks import Ranks
from muxtune.engine.runner import Runner
from muxtune.engine.starting import Admitted, Ready, check, opening, start
from muxtune.engine.task import Task
from muxtune.engine.task_folder import CHECKPOINTS, Origin, TaskFolder, holds_run
from muxtune.engine.trace_file import FOLDER, TraceFile, discard_traces
from muxtune.engine.waves import Waves
from muxtune.errors import AdapterError, CheckpointError, ConfigError, MuxTuneError, RankError, StateError
from muxtune.models.backbone import BlockChoice, BlockName
from muxtune.models.cache import default_cache_dir
from muxtune.models.memory import Footprint, footprint, memory_here
from muxtune.models.sources import ModelFolder, resolve
from muxtune.parallel.layout import RankLayout, layout_of
from muxtune.plan.memory import size_text
from muxtune.plan.profile import OperatorTable
from muxtune.spec.event import RunEvent, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.policy import Policy
from muxtune.spec.run import RunSpec

LOCK = ".muxtune.lock"


@dataclass(slots=True)
class TrainingRun:
    """Args:
    resume, overwrite: what to do with folders that hold a run; without either they are refused.
    keep_going: let a job with bad data or settings fail alone.
    stop: asked at each round; true checkpoints every task and ends the run.
    num_hidden_layers: cut the base model, for fast checks.
    notice: told what takes a while, in words, and "" when that is done.
    locate: tells a job's error where in a file its key was given (ResolvedRun.locate).
    ranks: those that hold the base model together, met, of which this process is the first; a dry run has none.
    """

    run: RunSpec
    resume: bool = False
    overwrite: bool = False
    keep_going: bool = False
    stop: Callable[[], bool] = lambda: False
    cache_dir: Path | None = None
    num_hidden_layers: int | None = None
    locate: Callable[[MuxTuneError], None] = lambda error: None
    notice: Callable[[str], None] = lambda text: None
    ranks: Ranks | None = None
    failures: list[Failure] = field(default_factory=list)  # jobs that could not begin; set while `events` runs
    _hashes: FileHashes = field(default_factory=FileHashes, init=False, repr=False)

    @property
    def layout(self) -> RankLayout:
        """Over how many ranks the base model is split."""
        return layout_of(self.run.tp, self.run.pp)

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
                planned.append(plan_job(job, folder, now, self._hashes, resume=self.resume, overwrite=self.overwrite))
            except (ConfigError, CheckpointError) as error:
                failures.append(Failure(job, error, checkpoint.latest_step(folder / CHECKPOINTS) or 0))
        if failures and not self.keep_going:
            raise _first_of(failures)
        return planned, failures

    def base(self) -> ModelFolder:
        return resolve(self.run.base_model, cache_dir=self.cache)

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
        preparer = Preparer(base.path, cache_dir=self.cache / "tokens")
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
        if self.ranks is None and self.layout.size > 1:
            raise ConfigError(
                f"{self.layout} are several processes, and this is one",
                where="tp" if self.run.tp > 1 else "pp",
                hint="`muxtune train CONFIG` starts them, or torchrun; docs/distributed.md",
            )
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

    def admit(self, prepared: list[PreparedJob], base: ModelFolder, planned: Sequence[PlannedJob] = ()) -> Admission:
        """What the jobs need of memory, who waits, and who is refused; `planned` tells how far each has come.

        Raises the first refusal unless `keep_going`.
        """
        device = choose_device(self.run.device)
        dtype = choose_dtype(self.run.dtype, device)
        used, free = memory_here(device)
        if self.layout.size > 1:
            free //= self.ranks.here if self.ranks is not None else self.layout.size
        limit = min(self.run.memory_limit or used + free, used + free)
        model = self._footprint(base, dtype, planned)
        admission = admit(
            prepared,
            model,
            dtype=dtype,
            limit_bytes=limit,
            process_bytes=used,
            memory_limit=self.run.memory_limit,
            done={plan.job.name: plan.progress.step for plan in planned},
        )
        for _, error in admission.refused:
            self.locate(error)
        if admission.refused and not self.keep_going:
            raise _first_of([Failure(job, error) for job, error in admission.refusals])
        return admission

    def _footprint(self, base: ModelFolder, dtype: torch.dtype, planned: Sequence[PlannedJob]) -> Footprint:
        """Of the base model, or of a rank's part: its share of the weights; of the rest, which is less than that of all
        by as much as a layer's rows are narrower, all is reckoned with."""
        if self.layout.size == 1:
            return footprint(base.path, dtype, self._block(planned))
        if self.run.block == "fast":
            hint = "block: auto, or transformers"
            raise ConfigError("the fast block does not run on several ranks yet", where="block", hint=hint)
        whole = footprint(base.path, dtype, "transformers")
        return replace(whole, weights_bytes=-(-whole.weights_bytes // self.layout.size))

    def _block(self, planned: Sequence[PlannedJob]) -> BlockChoice:
        """Jobs that go on have the block that they began with, where nobody asks for one and they agree: with another
        they are refused (`muxtune.engine.checkpoint`)."""
        begun = {plan.block for plan in planned if plan.begin == "continue" and plan.block is not None}
        return begun.pop() if self.run.block == "auto" and len(begun) == 1 else self.run.block

    def _train(
        self, plans: dict[str, PlannedJob], prepared: list[PreparedJob], base: ModelFolder
    ) -> Iterator[RunEvent]:
        run = self.run
        admission = self.admit(prepared, base, list(plans.values()))
        yield from self._fail([Failure(job, error, plans[job.name].progress.step) for job, error in admission.refused])
        if not admission.sizes:
            return
        policy = self._policy(admission, base)
        engine = LocalEngine(
            base,
            device=run.device,
            dtype=run.dtype,
            block=admission.model.block,
            threads=run.threads,
            policy=policy,
            memory=admission.memory,
            fuse_tokens=admission.fuse_tokens,
            recompute=admission.model.recompute,
            keep_tokens=admission.keep_tokens,
            num_hidden_layers=self.num_hidden_layers,
            cache_dir=self.cache,
            notice=self.notice,
            ranks=self.ranks,
        )
        if policy == "muxtune" and len(admission.sizes) > 1:
            engine.ready_to_plan()  # measured now where it must be, not in the first round
        folders, queue = yield from self._begin(engine, admission, plans, prepared)

        def sample(task: Task) -> list[tuple[str, str]]:
            prompts = task.job.sample_prompts
            return list(zip(prompts, engine.generate([(task, prompt) for prompt in prompts]), strict=True))

        with TraceFile.begin(Path(run.output_dir)) as trace:
            runner = Runner(engine, folders=folders, stop=self.stop, sampler=sample, trace=trace.append, queue=queue)
            yield from runner.run()

    def known_table(self, base: ModelFolder, block: BlockName) -> OperatorTable | None:
        """What operators cost, where it has been measured for a run like this; no weight is loaded."""
        if self.num_hidden_layers is not None:
            return None
        device = choose_device(self.run.device)
        dtype = choose_dtype(self.run.dtype, device)
        return find_table(base.path, self.cache, device=device, dtype=dtype, block=block)

    def _policy(self, admission: Admission, base: ModelFolder) -> Policy:
        """The run's, but where planning would have to measure first and memory has no room for that."""
        if self.run.policy == "muxtune" and self.layout.size > 1:
            return "fuse-all"  # what operators cost on ranks that speak to each other is not measured yet
        if self.run.policy != "muxtune" or len(admission.sizes) + len(admission.waiting) < 2:
            return self.run.policy
        needed, room = measuring_bytes(admission.model), admission.room.left_bytes(())
        if needed <= room or self.known_table(base, admission.model.block) is not None:
            return "muxtune"
        self.notice(
            f"measuring what operators cost takes {size_text(needed)}, and memory has room for {size_text(room)}: "
            "tasks are fused as they come (policy fuse-all). `muxtune profile` measures once for all runs"
        )
        return "fuse-all"

    def _begin(
        self,
        engine: LocalEngine,
        admission: Admission,
        plans: dict[str, PlannedJob],
        prepared: list[PreparedJob],
    ) -> Generator[RunEvent, None, tuple[dict[str, TaskFolder], Waves]]:
        """Start those that start now, see that the others can, and open the folders of all."""
        sizes = {size.job.name: size for size in (*admission.waiting, *admission.sizes)}
        data = {one.job.name: one for one in prepared}
        first = {size.job.name for size in admission.sizes}
        fitting = {size.job.peft.model_dump_json() for size in admission.sizes}
        ready: dict[str, Ready] = {}
        failures: list[Failure] = []
        for name, size in sizes.items():  # those that wait come first, while there is room for them
            job = Admitted(plans[name], data[name], size)
            try:
                ready[name] = start(engine, job) if name in first else check(engine, job, fitting)
            except RankError:
                raise
            except MuxTuneError as error:
                failures.append(Failure(job.plan.job, error, job.plan.progress.step))
        if failures and not self.keep_going:
            raise _first_of(failures)
        folders, unopened = self._open([ready[name] for name in data if name in ready], engine)
        yield from self._fail([*failures, *unopened])
        running = [ready[name] for name in folders if name in first]
        waiting = [ready[name] for name in folders if name not in first]
        queue = Waves(engine, admission.room, [one.job.size for one in running], waiting, self._fail)
        for one in running:
            for event in opening(one, recompute=admission.model.recompute):
                folders[one.name].record(event)
                yield event
        for event in queue.announce():
            folders[event.task].record(event)
            yield event
        return folders, queue

    def _fail(self, failures: list[Failure]) -> Iterator[TaskEvent]:
        self.failures += failures
        for failure in failures:
            yield TaskEvent("failed", failure.job.name, failure.step, failure.told, {"code": failure.error.code})

    def _open(self, ready: Sequence[Ready], engine: LocalEngine) -> tuple[dict[str, TaskFolder], list[Failure]]:
        """The folders to train into: what is overwritten goes, all of it first, then folders are made or reopened.

        Where one cannot be and `keep_going`, its task is detached.
        """
        if self.overwrite:
            self._discard(ready)
        folders: dict[str, TaskFolder] = {}
        failures: list[Failure] = []
        for one in ready:
            plan = one.job.plan
            origin = Origin(plan.job, plan.created, one.ground.base, self.run.base_model, one.ground.block)
            try:
                if plan.begin == "continue":
                    folders[one.name] = TaskFolder.reopen(plan.folder, origin, one.ground, engine.export, step=one.step)
                else:
                    folders[one.name] = TaskFolder.create(plan.folder, origin, one.ground, engine.export)
            except MuxTuneError as error:
                if not self.keep_going or isinstance(error, RankError):
                    raise
                if one.name in engine.tasks:
                    engine.detach(one.name)
                failures.append(Failure(plan.job, error, one.step))
        return folders, failures

    def _discard(self, ready: Sequence[Ready]) -> None:
        """What is overwritten; where no run is left beside it, the record of its rounds as well."""
        for one in ready:
            discard(one.job.plan.folder)
        output = Path(self.run.output_dir)
        if not any(path.is_dir() and path.name != FOLDER and holds_run(path) for path in output.iterdir()):
            discard_traces(output)

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
    def cache(self) -> Path:
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


def _finished(plan: PlannedJob) -> TaskEvent:
    step = plan.progress.step
    data = {"earlier": True, "total_steps": step, **plan.progress.told()}
    return TaskEvent("completed", plan.job.name, step, str(plan.folder), data)


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
