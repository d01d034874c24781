"""The round loop: rounds of optimizer steps until every task has had its own, with evaluation and saving between.

A round is one optimizer step of each participant. Between rounds - the only place where tasks start, stop, pause or
fail - the loop evaluates and checkpoints the tasks for which that is due, all evaluations of a round fused in
forward-only passes. It yields what happened as values (`muxtune.spec.event`) and writes nothing itself: folders are
the business of the `TaskFolder`s it is handed.

Whoever hears an event may attach, detach, pause or cancel any task before the next one. So nothing that was known of a
task before an event is believed after it: tasks are taken up through `_each`, which asks again at each turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from muxtune.engine.advice import advice
from muxtune.engine.engine import Engine
from muxtune.engine.failure import Raised, brief
from muxtune.engine.rounds import Parted, Round, run_round
from muxtune.engine.task import Task
from muxtune.errors import MuxTuneError, RankError
from muxtune.plan.round import Participant
from muxtune.plan.types import ItemOutcome, PairSums, Plan, RoundRecord, StepOutcome, WorkKind
from muxtune.spec.event import EvalResult, Rewards, RunEvent, StepResult, TaskEvent
from muxtune.spec.status import JobStatus

SAVE_EVERY_S = 600.0
Fairness = Callable[[Sequence[Task]], Sequence[Task]]
Sampler = Callable[[Task], Sequence[tuple[str, str]]]  # a task's (prompt, reply) pairs, now


class Folder(Protocol):
    """Where a task's results go (`muxtune.engine.task_folder`)."""

    def record(self, event: RunEvent) -> None: ...
    def checkpoint(self, task: Task) -> str: ...
    def complete(self, task: Task) -> str: ...


class Queue(Protocol):
    """Tasks that are still to come (`muxtune.engine.waves`)."""

    @property
    def waiting(self) -> int:
        """How many."""
        ...

    def start(self) -> Iterator[RunEvent]:
        """Detach tasks that have ended, attach those whose turn it is. With nothing running, one at least comes or
        fails."""
        ...


class _Nobody:
    """A queue of none."""

    waiting = 0

    def start(self) -> Iterator[RunEvent]:
        return iter(())


class Runner:
    """Args:
    folders: where each task writes, by name; a task without one writes nothing.
    stop: asked before each round; true ends the run after saving a checkpoint of every task.
    sampler: asked for replies to a job's `sample_prompts` whenever the task is evaluated, or at its end.
    trace: handed the record of everything that is executed, and before it the plan, where that is a new one.
    queue: asked at each step boundary for the tasks that start there.
    fair: picks a round's participants among the tasks that could run, at least one; all, by default. Who is left out
        goes on in a later round with the bits it would have had in this one.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        folders: Mapping[str, Folder] | None = None,
        stop: Callable[[], bool] = lambda: False,
        sampler: Sampler = lambda task: (),
        trace: Callable[[RoundRecord | Plan], None] = lambda record: None,
        queue: Queue | None = None,
        fair: Fairness = lambda tasks: tasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._folders = folders or {}
        self._stop = stop
        self._sampler = sampler
        self._trace = trace
        self._queue = queue or _Nobody()
        self._fair = fair
        self._clock = clock
        self._plan: Plan | None = None
        self._saved_at = {name: clock() for name in engine.tasks}
        self.interrupted = False

    def run(self) -> Iterator[RunEvent]:
        """Yield events until no task, attached or to come, has a step left, or `stop` says so."""
        try:
            for event in self._events():
                folder = self._folders.get(event.task)
                if folder is not None:
                    folder.record(event)
                yield event
        finally:
            self._engine.references.save()

    def _events(self) -> Iterator[RunEvent]:
        """Holds no task while the queue is asked: what has been detached is to be free then."""
        yield from self._complete_done()
        while self._runnable or self._queue.waiting:
            if self._stop():
                self.interrupted = True
                break
            if left := self._queue.waiting:
                yield from self._queue.start()
                yield from self._complete_done()
                if not self._runnable and self._queue.waiting == left:  # all that are attached have been paused
                    break
            yield from self._begin()
            yield from self._round()
        yield from self._set_aside()

    def _begin(self) -> Iterator[RunEvent]:
        for task in self._each(self._tasks(), lambda task: task.runnable and task.status is JobStatus.QUEUED):
            task.become(JobStatus.RUNNING)
            yield TaskEvent("resumed" if task.step else "started", task.name, task.step)

    def _round(self) -> Iterator[RunEvent]:
        if participants := self._participants():
            yield from self._after(self._run([task.participant() for task in participants]))

    @property
    def _runnable(self) -> bool:
        return any(task.runnable for task in self._tasks())

    def _complete_done(self) -> Iterator[RunEvent]:
        """Those that come with all their steps done."""
        for task in self._each(self._tasks(), lambda task: task.status is JobStatus.QUEUED):
            if task.step >= task.total_steps:
                yield from self._complete(task)

    def _run(self, participants: Sequence[Participant], kind: WorkKind = "train") -> Round:
        found = run_round(self._engine, participants, kind)
        if self._engine.plan is not None and self._engine.plan is not self._plan:
            self._plan = self._engine.plan
            self._trace(self._plan)
        for record in (*found.referred, *found.records):
            self._trace(record)
        return found

    def _tasks(self) -> list[Task]:
        return list(self._engine.tasks.values())

    def _each(self, tasks: Iterable[Task], holds: Callable[[Task], bool]) -> Iterator[Task]:
        """Those of the tasks that are attached still, and for which `holds` is true, when their turn comes."""
        for task in tasks:
            if self._engine.tasks.get(task.name) is task and holds(task):
                yield task

    def _participants(self) -> Sequence[Task]:
        """Those of the tasks that can run whom the fairness policy picks."""
        able = [task for task in self._tasks() if task.runnable and task.status is JobStatus.RUNNING]
        picked = self._fair(able) if able else able
        assert bool(picked) == bool(able) and set(picked) <= set(able), "a round of nobody, or of who cannot run"
        return picked

    def _after(self, found: Round) -> Iterator[RunEvent]:
        steps = [(self._engine.tasks[outcome.task], outcome, wall_s) for outcome, wall_s in found.steps]
        raised = {self._engine.tasks[name]: why for name, why in found.raised.items() if name is not None}
        spared = {self._engine.tasks[name]: why for name, why in found.spared.items()}
        for task, outcome, wall_s in steps:
            if outcome.error is None:
                yield step_result(task, outcome, wall_s)
            elif self._in_run(task):
                yield self._fail(task, outcome.error)
        for task in self._each(spared, self._in_run):
            yield _spared_event(task, spared[task])
        yield from self._part(raised, found.parted)
        stepped = [task for task, outcome, _ in steps if outcome.error is None]
        yield from self._evaluate([task for task in stepped if self._in_run(task) and evaluation_due(task)])
        for task in self._each(stepped, lambda task: self._in_run(task) and sampling_due(task)):
            yield from self._sample(task)
        for task in self._each(stepped, self._in_run):
            if task.step >= task.total_steps:
                yield from self._complete(task)
            elif self._save_due(task):
                yield from self._checkpoint(task)

    def _in_run(self, task: Task) -> bool:
        return self._engine.tasks.get(task.name) is task and task.status is JobStatus.RUNNING

    def _part(self, raised: Mapping[Task, Raised], parted: Sequence[Parted]) -> Iterator[TaskEvent]:
        """Fail those whose pass raised; tell where only a fused one did."""
        for task in self._each(raised, self._in_run):
            why = raised[task]
            yield self._fail(task, f"exception: {why.message}", traceback=why.traceback)
        for one in parted:
            first = [task for task in self._tasks() if task.name == one.tasks[0]]
            for task in self._each(first, self._in_run):
                yield _parted_event(task, one)

    def _evaluate(self, tasks: Sequence[Task]) -> Iterator[RunEvent]:
        if not tasks:
            return
        found = self._run([task.validation_participant() for task in tasks], "eval")
        for task in tasks:
            if task.name not in found.raised:
                yield eval_result(task, found.items(task.name))
        yield from self._part(
            {task: found.raised[task.name] for task in tasks if task.name in found.raised}, found.parted
        )

    def _sample(self, task: Task) -> Iterator[TaskEvent]:
        """A prompt that cannot be answered (too long, say) costs a warning, not the training."""
        try:
            pairs = self._sampler(task)
        except RankError:
            raise
        except Exception as error:
            told = error.message if isinstance(error, MuxTuneError) else brief(error)
            yield TaskEvent("warning", task.name, task.step, f"sample_prompts: {told}")
            return
        for prompt, reply in pairs:
            yield TaskEvent("sample", task.name, task.step, data={"prompt": prompt, "reply": reply})

    def _fail(self, task: Task, error: str, **more: str) -> TaskEvent:
        task.become(JobStatus.FAILED)
        code, _, message = error.partition(": ")
        if hint := advice(code, task.step, task.learning_rate()):
            more["hint"] = hint
        return TaskEvent("failed", task.name, task.step, message, {"code": code, **more})

    def _complete(self, task: Task) -> Iterator[RunEvent]:
        if task.status is JobStatus.QUEUED:
            task.become(JobStatus.RUNNING)
        folder = self._folders.get(task.name)
        yield from self._checkpoint(task)
        if not self._in_run(task):  # it failed, or whoever heard of the checkpoint has stopped it
            return
        path = folder.complete(task) if folder is not None else ""
        task.become(JobStatus.COMPLETED)
        yield TaskEvent("completed", task.name, task.step, path)

    def _set_aside(self) -> Iterator[RunEvent]:
        """Save what still has steps left when the loop ends: all that ran where it was stopped, and what is paused."""
        for task in self._each(self._tasks(), lambda task: not task.status.final):
            yield from self._checkpoint(task)
            if self._in_run(task):
                task.become(JobStatus.QUEUED)
                yield TaskEvent("queued", task.name, task.step)

    def _checkpoint(self, task: Task) -> Iterator[RunEvent]:
        """Save the task - or fail it, where the step just taken left numbers that no later step can mend."""
        if not task.finite:
            yield self._fail(task, "non_finite_weights: the last step made a weight infinite or NaN")
            return
        folder = self._folders.get(task.name)
        if folder is not None:
            path = folder.checkpoint(task)
            self._saved_at[task.name] = self._clock()
            yield TaskEvent("checkpoint", task.name, task.step, path)

    def _save_due(self, task: Task) -> bool:
        every = task.job.save_steps or task.sampler.steps_per_epoch
        started = self._saved_at.setdefault(task.name, self._clock())
        return task.step % every == 0 or self._clock() - started >= SAVE_EVERY_S


def _spared_event(task: Task, why: Raised) -> TaskEvent:
    told = f"its pass had not enough memory ({why.message}): from now on its activations are computed twice"
    return TaskEvent("warning", task.name, task.step, told, {"code": "exception", "traceback": why.traceback})


def _parted_event(task: Task, parted: Parted) -> TaskEvent:
    others = ", ".join(name for name in parted.tasks if name not in (None, task.name))
    told = f"a pass with {others} raised, each alone did not; passes are narrower now ({parted.why.message})"
    data = {"code": "exception", "traceback": parted.why.traceback}
    return TaskEvent("warning", task.name, task.step, told, data)


def evaluation_due(task: Task) -> bool:
    """Every `eval_steps` steps (or epoch), and after the last."""
    if not task.data.validation:
        return False
    every = task.job.eval_every or task.sampler.steps_per_epoch
    return task.step % every == 0 or task.step >= task.total_steps


def sampling_due(task: Task) -> bool:
    """With each evaluation, or after the last step where nothing is held out."""
    if not task.job.sample_prompts:
        return False
    return evaluation_due(task) or task.step >= task.total_steps


def step_result(task: Task, outcome: StepOutcome, wall_s: float) -> StepResult:
    """The event of an applied step; `wall_s` is the time of the round that held it."""
    return StepResult(
        task.name,
        outcome.step,
        outcome.loss,
        outcome.lr,
        outcome.grad_norm,
        outcome.tokens,
        outcome.input_tokens,
        outcome.accuracy,
        task.epoch,
        wall_s,
        _rewards(outcome.pairs),
    )


def eval_result(task: Task, items: Sequence[ItemOutcome]) -> EvalResult:
    """Mean over all trained tokens, or all pairs, of the validation set."""
    terms = max(1, sum(item.terms for item in items))
    loss, accuracy = sum(item.loss_sum for item in items) / terms, sum(item.correct for item in items) / terms
    pairs = [item.pairs for item in items if item.pairs is not None]
    return EvalResult(
        task.name,
        task.step,
        loss,
        accuracy,
        sum(item.tokens for item in items),
        _rewards(sum(pairs, PairSums()) if pairs else None),
    )


def _rewards(pairs: PairSums | None) -> Rewards | None:
    if pairs is None:
        return None
    count = max(1, pairs.pairs)
    return Rewards(pairs.chosen / count, pairs.rejected / count)
