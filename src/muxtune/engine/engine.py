"""The engine: one loaded backbone, and the tasks that are attached to it now.

Attaching or detaching a task allocates or frees its adapter and optimizer and touches nothing else: the backbone is
loaded once and its bytes never change. `execute` is the one primitive; a training round, an evaluation, a reference
pass and decoding are schedules of it, and so are the client-driven calls `forward_backward`, `forward` and
`optim_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muxtune.data.types import TokenSequence
from muxtune.engine.executor import Executor, Source
from muxtune.engine.task import Sequences, Task, participant_of
from muxtune.errors import ConfigError, DataError, StateError
from muxtune.models.backbone import Backbone
from muxtune.models.probe import rows_invariant
from muxtune.peft.grouped import Rule, measured
from muxtune.peft.registry import build_adapter
from muxtune.peft.slab import Slabs
from muxtune.plan.round import Participant, Policy, derive_round
from muxtune.plan.types import ItemOutcome, OptimStep, RoundRecord, RoundSchedule, StepOutcome, WorkKind
from muxtune.spec.job import JobSpec
from muxtune.spec.status import JobStatus

DEFAULT_CHUNK_TOKENS = 512
DEFAULT_FUSE_TOKENS = 2048


class Engine:
    """Trains tasks on `backbone`, which the caller has loaded (`muxtune.engine.load`).

    Args:
        policy: who runs with whom - `sequential`, or `fuse-all` up to `fuse_tokens` rows.
        fuse_tokens: rows that the tasks of one micro-batch may bring together; bounds the activation memory.
        chunk_tokens: the chunk budget of tasks that start here; a resumed task keeps its own.
        plain: run the plain twin of every fast path.
        grouping: where adapters of a kind run as one; `never` is the twin, and the same to the bit.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        policy: Policy = "fuse-all",
        fuse_tokens: int = DEFAULT_FUSE_TOKENS,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        plain: bool = False,
        grouping: Rule = measured,
    ) -> None:
        self.backbone = backbone
        self.tasks: dict[str, Task] = {}
        self.sources: dict[str, Source] = {}
        self.policy: Policy = policy
        self._fuse_tokens = fuse_tokens
        self._chunk_tokens = chunk_tokens
        self._executor = Executor(backbone, self.tasks, self.sources, plain=plain, grouping=grouping)
        self._rounds = 0
        self._slabs = Slabs()
        self.row_invariant = rows_invariant(backbone)

    def attach(self, job: JobSpec, data: Sequences, *, chunk_tokens: int | None = None) -> Task:
        """Start a task. Raises ConfigError for a name in use, DataError for tokens the backbone does not have,
        AdapterError for targets that match nothing."""
        if job.name in self.tasks:
            raise ConfigError("a task of this name is attached already", where=job.name, hint="detach it first")
        self._check_tokens(job, (*data.train, *data.validation))
        adapter = build_adapter(
            job.peft,
            self.backbone,
            seed=job.seed,
            dtype=self.backbone.dtype,
            device=self.backbone.device,
        )
        self._slabs.take(adapter)
        task = Task(job, adapter, data, chunk_tokens=chunk_tokens or self._chunk_tokens)
        self.tasks[task.name] = task
        self.sources[task.train_source] = data.train
        self.sources[task.validation_source] = data.validation
        return task

    def detach(self, task: Task | str) -> None:
        """Forget a task; what it had not applied is dropped."""
        found = self.task(task)
        found.drop_pending()
        del self.tasks[found.name], self.sources[found.train_source], self.sources[found.validation_source]

    def pause(self, task: Task | str) -> None:
        """Leave a task out of the rounds to come; `resume` brings it back where it was."""
        self.task(task).become(JobStatus.PAUSED)

    def resume(self, task: Task | str) -> None:
        self.task(task).become(JobStatus.RUNNING)

    def cancel(self, task: Task | str) -> None:
        """End a task at this step boundary; its adapter stays readable until it is detached."""
        self.task(task).become(JobStatus.CANCELLED)

    def task(self, task: Task | str) -> Task:
        """The attached task; raises StateError where there is none."""
        name = task if isinstance(task, str) else task.name
        found = self.tasks.get(name)
        if found is None or (isinstance(task, Task) and found is not task):
            raise StateError(
                "no such task is attached", where=name, hint="attached: " + (", ".join(self.tasks) or "none")
            )
        return found

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        """Run a schedule; see `muxtune.plan.types` for what is legal."""
        return self._executor.execute(schedule)

    def schedule(self, participants: Sequence[Participant], kind: WorkKind = "train") -> RoundSchedule:
        """A round of these participants under the engine's policy."""
        self._rounds += 1
        return derive_round(self._rounds, participants, policy=self.policy, fuse_tokens=self._fuse_tokens, kind=kind)

    def forward_backward(self, batches: Mapping[Task | str, Sequence[TokenSequence]]) -> dict[str, ItemOutcome]:
        """Add the gradients of one batch of each task, in one fused pass; `optim_step` applies them.

        A batch's loss is the mean over its trained tokens.
        """
        return self._drive(batches, "train")

    def forward(self, batches: Mapping[Task | str, Sequence[TokenSequence]]) -> dict[str, ItemOutcome]:
        """Log-probabilities of the trained tokens of one batch of each task; no gradient, no dropout."""
        return self._drive(batches, "reference")

    def optim_step(self, task: Task | str, *, lr: float | None = None) -> StepOutcome:
        """Apply what `forward_backward` gathered, at `lr` or the job's own schedule."""
        found = self.task(task)
        if lr is not None:
            return found.optimizer_step(lr)
        (record,) = self.execute(RoundSchedule(0, (OptimStep(found.name),))).actions
        assert record.step is not None
        return record.step

    def _drive(self, batches: Mapping[Task | str, Sequence[TokenSequence]], kind: WorkKind) -> dict[str, ItemOutcome]:
        participants: list[Participant] = []
        for key, sequences in batches.items():
            task = self.task(key)
            self._check_tokens(task.job, sequences)
            source = f"{task.name}/inbox"
            self.sources[source] = sequences
            indices = range(len(sequences))
            participants.append(participant_of(task.job, source, sequences, indices, task.chunk_tokens))
        schedule = derive_round(0, participants, policy=self.policy, fuse_tokens=self._fuse_tokens, kind=kind)
        passes = tuple(action for action in schedule.actions if not isinstance(action, OptimStep))
        try:
            record = self.execute(RoundSchedule(0, passes))
        finally:
            for participant in participants:
                del self.sources[participant.source]
        merged: dict[str, ItemOutcome] = {}
        for outcome in (item for action in record.actions for item in action.items):
            assert outcome.task is not None
            merged[outcome.task] = _merge(merged.get(outcome.task), outcome)
        return merged

    def _check_tokens(self, job: JobSpec, sequences: Sequence[TokenSequence]) -> None:
        """An id outside the vocabulary, or a position outside the model's, would fail inside the fused pass."""
        name, lead = job.name, job.peft.lead
        limit, longest = self.backbone.vocabulary, self.backbone.max_positions
        for sequence in sequences:
            if len(sequence) == 0 or int(sequence.ids.min()) < 0 or int(sequence.ids.max()) >= limit:
                raise DataError(
                    f"example {sequence.index} is empty or holds token ids outside 0..{limit - 1}", where=name
                )
            if longest is not None and lead + len(sequence) > longest:
                virtual = f" after {lead} virtual ones" if lead else ""
                raise DataError(
                    f"example {sequence.index} has {len(sequence)} tokens{virtual}, the base model takes {longest}",
                    where=name,
                    hint="set max_length",
                )


def _merge(first: ItemOutcome | None, second: ItemOutcome) -> ItemOutcome:
    if first is None:
        return second
    joined = (first.logprobs or ()) + (second.logprobs or ())
    return ItemOutcome(
        second.task,
        second.kind,
        first.loss_sum + second.loss_sum,
        first.tokens + second.tokens,
        first.correct + second.correct,
        first.input_tokens + second.input_tokens,
        joined if second.logprobs is not None else None,
    )
