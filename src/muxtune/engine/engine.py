"""The engine: one loaded backbone, and the tasks that are attached to it now.

Attaching or detaching a task allocates or frees its adapter and optimizer and touches nothing else: the backbone is
loaded once and its bytes never change. `execute` is the one primitive; a training round, an evaluation, a reference
pass and decoding are schedules of it, and so are the client-driven calls `forward_backward`, `forward` and
`optim_step`. What dpo compares with, the bare backbone's log-probabilities, is such a schedule too (`refer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from muxtune.data.types import TokenSequence
from muxtune.engine.decode import DecodeSource
from muxtune.engine.executor import Executor, Source, TimesOf, by_rows
from muxtune.engine.flights import StageRecord
from muxtune.engine.followers import Followers, Nobody
from muxtune.engine.limits import require_all_known
from muxtune.engine.outcomes import merged
from muxtune.engine.pipelined import PipelineExecutor
from muxtune.engine.planning import Planning
from muxtune.engine.preference import sequence_sums
from muxtune.engine.references import Asked, References, Turn, asked_of, in_turn
from muxtune.engine.task import Sequences, Task, aligned, likeness_of
from muxtune.errors import ConfigError, DataError, StateError
from muxtune.models.backbone import Backbone
from muxtune.models.probe import rows_invariant
from muxtune.parallel.adapters import GradientSum, ShardedAdapter, sharded_adapter
from muxtune.parallel.orchestrate import Record
from muxtune.parallel.stage import ShardedStage, StagedBackbone
from muxtune.parallel.staged import StagedAdapter, staged_adapter
from muxtune.parallel.tensor import ShardedBackbone
from muxtune.peft.base import Adapter
from muxtune.peft.grouped import Rule, measured
from muxtune.peft.registry import build_adapter
from muxtune.peft.slab import Slabs
from muxtune.plan.interleave import interleaved
from muxtune.plan.round import Participant, derive_round
from muxtune.plan.types import (
    ItemOutcome,
    OptimStep,
    Plan,
    RoundRecord,
    RoundSchedule,
    StepOutcome,
    WorkKind,
)
from muxtune.spec.job import JobSpec
from muxtune.spec.policy import Policy
from muxtune.spec.status import JobStatus

DEFAULT_CHUNK_TOKENS = 512
DEFAULT_FUSE_TOKENS = 2048
_REFERENCE = "reference"  # no task's source: those have a slash


class Engine:
    """Trains tasks on `backbone`, which the caller has loaded (`muxtune.engine.load`).

    Args:
        policy: who runs with whom - as `planning` plans it with `muxtune`; `sequential`, `fuse-all` up to `fuse_tokens`
            rows, or `padded`, for comparison.
        planning: makes the plans of `muxtune`, which without it is `fuse-all`.
        fuse_tokens: rows that the tasks of one micro-batch may bring together; bounds the activation memory.
        chunk_tokens: the chunk budget of tasks that start here; a resumed task keeps its own.
        plain: run the plain twin of every fast path.
        recompute: keep each block's input rows only and run it again in the backward pass: the same bits, for a
            fraction of the activations' memory and one more forward pass.
        keep_tokens: rows of cut sequences whose activations may be held from their forward pass until they train: as
            many of the last pieces as fit; those before them run twice. The same bits either way.
        references: what is known of the bare backbone's log-probabilities, from earlier runs for instance.
        grouping: where adapters of a kind run as one; `never` is the twin, and the same to the bit.
        followers: told of each primitive before it runs, where other ranks hold parts of the backbone.
        together: hTasks that take turns in a round; on a backbone that is split over ranks their passes then overlap.
        overlap: whether they do, and on a stage of several whether passes are under way at once; without it they run
            one after another, the same to the bit.
        times: what their passes take, from which the order follows in which they take turns: the same on all ranks.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        policy: Policy = "fuse-all",
        planning: Planning | None = None,
        fuse_tokens: int = DEFAULT_FUSE_TOKENS,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        plain: bool = False,
        recompute: bool = False,
        keep_tokens: int = 0,
        references: References | None = None,
        grouping: Rule = measured,
        followers: Followers | None = None,
        together: int = 1,
        overlap: bool = True,
        times: TimesOf = by_rows,
    ) -> None:
        self.backbone = backbone
        self._followers: Followers = followers or Nobody()
        self.tasks: dict[str, Task] = {}
        self.sharded: dict[str, ShardedAdapter | StagedAdapter] = {}  # by task, where other ranks have parts of it
        self._staged: dict[str, StagedAdapter] = {}  # those of a stage
        self.sources: dict[str, Source] = {}
        self.policy: Policy = policy
        self.planning = planning
        self.fuse_tokens = fuse_tokens
        self._fused_at_most: int | None = None  # since a wider pass has failed
        self._kept_at_most: int | None = None
        self.recompute = recompute
        self.keep_tokens = keep_tokens
        self._chunk_tokens = chunk_tokens
        self._plain = plain
        self.references = references or References()
        self._executor = self._executor_of(backbone, plain, grouping, overlap, times)
        self._together = together
        self._spared: set[str] = set()
        self._rounds = 0
        self._slabs = Slabs()
        self.row_invariant = rows_invariant(backbone)

    def attach(self, job: JobSpec, data: Sequences, *, chunk_tokens: int | None = None) -> Task:
        """Start a task. Raises ConfigError for a name in use, DataError for tokens the backbone does not have,
        AdapterError for targets that match nothing."""
        if job.name in self.tasks:
            raise ConfigError("a task of this name is attached already", where=job.name, hint="detach it first")
        self.check(job, data)
        budget = chunk_tokens or self._chunk_tokens
        with self._followers.attaching(job, data, budget):
            adapter, norm = self._fresh(job)
            self._slabs.take(adapter)
            task = Task(job, adapter, data, chunk_tokens=budget, plain=self._plain, norm=norm)
        task.whole = self._followers.whole(task)
        self.tasks[task.name] = task
        self.sources[task.train_source] = data.train
        self.sources[task.validation_source] = data.validation
        return task

    def _fresh(self, job: JobSpec) -> tuple[Adapter, Callable[[], float] | None]:
        """The job's adapter, and what its gradient needs before a step where other ranks have parts of it."""
        backbone, seed = self.backbone, job.seed
        if isinstance(backbone, StagedBackbone | ShardedStage):
            staged = staged_adapter(job.peft, backbone, seed=seed, dtype=backbone.dtype, device=backbone.device)
            self.sharded[job.name] = self._staged[job.name] = staged
            return staged.adapter, staged.norm
        if not isinstance(backbone, ShardedBackbone):
            return build_adapter(job.peft, backbone, seed=seed, dtype=backbone.dtype, device=backbone.device), None
        sharded = sharded_adapter(job.peft, backbone, seed=seed, dtype=backbone.dtype, device=backbone.device)
        self.sharded[job.name] = sharded
        return sharded.adapter, GradientSum(sharded)

    def _executor_of(self, backbone: Backbone, plain: bool, grouping: Rule, overlap: bool, times: TimesOf) -> Executor:
        of = self.tasks, self.sources, self.references
        if isinstance(backbone, StagedBackbone | ShardedStage):
            return PipelineExecutor(backbone, *of, staged=self._staged, plain=plain, grouping=grouping, overlap=overlap)
        return Executor(backbone, *of, plain=plain, grouping=grouping, overlap=overlap, times=times)

    def check(self, job: JobSpec, data: Sequences) -> None:
        """What `attach` finds out of the data. Raises DataError."""
        self._check_tokens(job, (*data.train, *data.validation))
        for sequences in (data.train, data.validation):
            _require_groups(job, sequences, job.group_size)

    def detach(self, task: Task | str) -> None:
        """Forget a task; what it had not applied is dropped."""
        found = self.task(task)
        with self._followers.detaching(found.name):
            found.drop_pending()
        del self.tasks[found.name]
        self.sharded.pop(found.name, None)
        self._staged.pop(found.name, None)
        self._spared.discard(found.name)
        for source in (found.train_source, found.validation_source):
            del self.sources[source]
            self.references.forget(source)
        self.references.save()

    def trim(self) -> None:
        """Give memory that detached tasks have left back to the system, where it was kept for others of their kind."""
        with self._followers.trimming():
            self._slabs.trim()

    def pause(self, task: Task | str) -> None:
        """Leave a task out of the rounds to come; `resume` brings it back where it was."""
        self.task(task).become(JobStatus.PAUSED)

    def resume(self, task: Task | str) -> None:
        self.task(task).become(JobStatus.RUNNING)

    def cancel(self, task: Task | str) -> None:
        """End a task at this step boundary; its adapter stays readable until it is detached."""
        self.task(task).become(JobStatus.CANCELLED)

    def task(self, task: Task | str | object) -> Task:
        """The attached task; raises StateError where there is none."""
        name = task.name if isinstance(task, Task) else str(task)
        found = self.tasks.get(name)
        if found is None or (isinstance(task, Task) and found is not task):
            raise StateError(
                "no such task is attached", where=name, hint="attached: " + (", ".join(self.tasks) or "none")
            )
        return found

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        """Run a schedule; see `muxtune.plan.types` for what is legal, `Executor.execute` for what it raises."""
        with self._followers.executing(schedule, self.sources, self.references) as outcome:
            outcome.record = record = self._executor.execute(schedule)
        if self.planning is not None:
            self.planning.observe(record, self.tasks, self.sources)
        return record

    def recorded(self, schedule: RoundSchedule, clock: Callable[[], float]) -> Record | StageRecord:
        """Run a schedule on a backbone that is split over ranks; what this one did when, by `clock`: of a stage all,
        else the passes that trained."""
        with self._executor.recording(clock) as record:
            self.execute(schedule)
        return record

    @contextmanager
    def lending(self, sources: Mapping[str, Source]) -> Iterator[None]:
        """Have sequences to run while the block lasts. Raises StateError, with nothing lent, for a name in use."""
        taken = sorted(sources.keys() & self.sources.keys())
        if taken:
            raise StateError("a source of this name is in use", where=taken[0])
        with self._followers.lending(sources):
            self.sources.update(sources)
        try:
            yield
        finally:
            with self._followers.returning(list(sources)):
                pass
            for name in sources:
                del self.sources[name]
                self.references.forget(name)

    def fuse_below(self, rows: int) -> None:
        """Bring tasks together in passes of half as many rows, from here on, and keep half as many between passes; a
        pass of `rows` has failed."""
        self.fuse_tokens = self._fused_at_most = max(1, min(self.fuse_tokens, rows // 2))
        self.keep_tokens = self._kept_at_most = self.keep_tokens // 2

    def fuse_up_to(self, rows: int, keep: int = 0) -> None:
        """Bring tasks together in passes of up to `rows` from here on, and keep up to `keep` between them; fewer where
        as many have failed."""
        self.fuse_tokens = rows if self._fused_at_most is None else min(rows, self._fused_at_most)
        self.keep_tokens = keep if self._kept_at_most is None else min(keep, self._kept_at_most)

    def spare(self, task: str) -> bool:
        """Recompute the activations of this task's passes from here on, as `recompute` does for all, and keep none
        between them; a pass of its own has failed. False where that is done already."""
        if self.recompute or task in self._spared:
            return False
        self._spared.add(task)
        return True

    def schedule(self, participants: Sequence[Participant], kind: WorkKind = "train") -> RoundSchedule:
        """A round of these participants under the engine's policy."""
        self._rounds += 1
        if self.policy == "muxtune" and self.planning is not None and kind == "train":
            tasks = [task for task in self.tasks.values() if task.data.train]
            running = [task for task in tasks if task.runnable]
            held = [task for task in tasks if not task.runnable]
            plan = self.planning.renew(running, held, self.fuse_tokens, self.keep_tokens)
            return self._derive(self._rounds, participants, kind, plan)
        return self._derive(self._rounds, participants, kind)

    def ready_to_plan(self) -> None:
        """Have what plans are made on; without it the first plan waits for that."""
        if self.planning is not None:
            self.planning.cost()

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.planning.plan if self.planning is not None else None

    def _derive(
        self, number: int, participants: Sequence[Participant], kind: WorkKind, plan: Plan | None = None
    ) -> RoundSchedule:
        schedule = derive_round(
            number,
            participants,
            policy=self.policy,
            fuse_tokens=self.fuse_tokens,
            kind=kind,
            recompute=self.recompute,
            plan=plan,
            spared=self._spared,
            keep_tokens=self.keep_tokens,
        )
        return interleaved(schedule, self._together) if kind == "train" and self._together > 1 else schedule

    def refer(self, participants: Sequence[Participant]) -> RoundRecord | None:
        """Compute what the dpo tasks among them will be compared with; None where all of it is known.

        One fused forward-only schedule of the bare backbone for all of them, each sequence once, but for what a pair
        has in common, which is computed for both where it is when they train.
        """
        wanted: dict[bytes, Asked] = {}
        for participant in participants:
            source = self.sources[participant.source]
            if participant.loss == "dpo" and not isinstance(source, DecodeSource):
                refs = (ref for chunk in participant.chunks for ref in chunk)
                asked = {ref.index: asked_of(source, ref.index, paired=ref.shared > 0) for ref in refs}
                wanted |= self.references.missing(participant.source, asked)
        if not wanted:
            return None
        turns = in_turn(wanted)
        sequences = [turn.sequence for turn in turns]
        schedule = self._derive(0, [_referring(turns, self.fuse_tokens)], "reference")
        with self.lending({_REFERENCE: sequences}):
            record = self.execute(schedule)
        logprob_n = np.array(merged(record, None, sequences).logprobs, np.float64)
        sums = sequence_sums(logprob_n, [one.trained_tokens for one in sequences])
        self.references.learn([turn.digest for turn in turns], sums)
        return record

    def forward_backward(self, batches: Mapping[Task | str, Sequence[TokenSequence]]) -> dict[str, ItemOutcome]:
        """Add the gradients of one batch of each task, in one fused pass; `optim_step` applies them.

        A batch's loss is the mean over its trained tokens; in dpo, over its pairs, which come as chosen, rejected,
        chosen, rejected, ... Raises StateError for a task named twice or not attached and DataError for a batch that
        cannot run (half a pair), before anything has; PassError, with the gradients of all these tasks dropped, where
        the pass raises.
        """
        return self._drive(batches, "train")

    def forward(self, batches: Mapping[Task | str, Sequence[TokenSequence]]) -> dict[str, ItemOutcome]:
        """Log-probabilities of the trained tokens of one batch of each task; no gradient, no dropout."""
        return self._drive(batches, "reference")

    def optim_step(self, task: Task | str, *, lr: float | None = None) -> StepOutcome:
        """Apply what `forward_backward` gathered, at `lr` or the job's own schedule.

        Raises StateError where nothing has been gathered, or for an `lr` that is no rate.
        """
        (record,) = self.execute(RoundSchedule(0, (OptimStep(self.task(task).name, lr),))).actions
        assert record.step is not None
        return record.step

    def _drive(self, batches: Mapping[Task | str, Sequence[TokenSequence]], kind: WorkKind) -> dict[str, ItemOutcome]:
        inboxes, participants = self._inboxes(batches, kind)
        schedule = self._derive(0, participants, kind)
        passes = tuple(action for action in schedule.actions if not isinstance(action, OptimStep))
        with self.lending(inboxes):
            if kind == "train":
                self.refer(participants)
            record = self.execute(RoundSchedule(0, passes))
        return {one.task: merged(record, one.task, inboxes[one.source]) for one in participants if one.task is not None}

    def _inboxes(
        self, batches: Mapping[Task | str, Sequence[TokenSequence]], kind: WorkKind
    ) -> tuple[dict[str, Sequence[TokenSequence]], list[Participant]]:
        """The batches as sources, and who brings them; registers nothing."""
        inboxes: dict[str, Sequence[TokenSequence]] = {}
        participants: list[Participant] = []
        for key, sequences in batches.items():
            task = self.task(key)
            source = f"{task.name}/inbox"
            if source in inboxes:
                raise StateError("the batches name this task twice", where=task.name, hint="join them into one")
            if not sequences:
                raise DataError("this task's batch is empty", where=task.name)
            group = task.job.group_size if kind == "train" else 1
            _require_groups(task.job, sequences, group)
            self._check_tokens(task.job, sequences)
            inboxes[source] = sequences
            indices, forward = range(len(sequences)), kind != "train"
            participants.append(task.bringing(source, sequences, indices, group=group, forward=forward))
        return inboxes, participants

    def _check_tokens(self, job: JobSpec, sequences: Sequence[TokenSequence]) -> None:
        require_all_known(sequences, self.backbone, where=job.name, lead=job.peft.lead)


def _referring(turns: Sequence[Turn], fuse_tokens: int) -> Participant:
    """The bare backbone on these; what shares rows is never parted, however narrow passes are: it fits into a chunk of
    its task."""
    lengths = [turn.sequence.input_tokens for turn in turns]
    pairs = [
        length + before - turn.common
        for before, length, turn in zip(lengths, lengths[1:], turns[1:], strict=False)
        if turn.common
    ]
    likeness = likeness_of(range(len(turns)), [turn.common for turn in turns])
    chunks, _ = aligned(range(len(turns)), lengths, max([fuse_tokens, *pairs]), forward=True, likeness=likeness)
    return Participant(None, _REFERENCE, chunks)


def _require_groups(job: JobSpec, sequences: Sequence[TokenSequence], group: int) -> None:
    if len(sequences) % group:
        raise DataError(
            f"{len(sequences)} sequences are not whole pairs",
            where=job.name,
            hint="dpo takes them as chosen, rejected, chosen, rejected, ...",
        )
