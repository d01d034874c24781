"""What is known of a run while it goes on: the state that its events add up to, and how fast it moves.

The boundary: events in, values out; how they look is the business of `table`, `lines` and `summary`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from muxtune.spec.event import EvalResult, RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import type_name

_WINDOW_S = 20.0
_STATES = {"started": "running", "resumed": "running", "queued": "queued", "paused": "paused"}
_ENDED = ("completed", "failed", "cancelled")


class Pace:
    """Speed over the last seconds, evaluations and savings included."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, steps, tokens), both sums since the start

    def start(self, now_s: float) -> None:
        self._marks = deque([(now_s, 0, 0)])

    def add(self, now_s: float, tokens: int) -> None:
        _, steps, total = self._marks[-1] if self._marks else (now_s, 0, 0)
        self._marks.append((now_s, steps + 1, total + tokens))
        while len(self._marks) > 2 and self._marks[1][0] < now_s - _WINDOW_S:
            self._marks.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        return self._rate(2)

    @property
    def steps_per_s(self) -> float | None:
        return self._rate(1)

    def _rate(self, what: int) -> float | None:
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        elapsed_s = last[0] - first[0]
        return (last[what] - first[what]) / elapsed_s if elapsed_s > 0 else None


@dataclass(slots=True)
class TaskView:
    """One task. `earlier` says that it had been completed before this run."""

    name: str
    peft: str
    logging_steps: int
    state: str = "queued"
    step: int = 0
    total: int | None = None
    epoch: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    eval_loss: float | None = None
    message: str = ""  # why it failed, or where its adapter lies
    earlier: bool = False
    pace: Pace = field(default_factory=Pace)
    samples: list[tuple[str, str]] = field(default_factory=list)  # of the last time that it was asked
    _sampled_at: int = -1

    @property
    def active(self) -> bool:
        return self.state == "running"

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def eta_s(self) -> float | None:
        rate = self.pace.steps_per_s
        if not self.active or self.total is None or not rate:
            return None
        return (self.total - self.step) / rate

    def hear_step(self, result: StepResult, now_s: float) -> None:
        self.step, self.epoch = result.step, result.epoch
        self.loss, self.lr, self.grad_norm = result.loss, result.lr, result.grad_norm
        self.pace.add(now_s, result.input_tokens)

    def hear_event(self, event: TaskEvent, now_s: float) -> None:
        """A change of state, the job's size, what an earlier process came to, or a reply to one of its prompts."""
        if event.kind in _STATES:
            self.state, self.step = _STATES[event.kind], event.step
            if event.data.get("waiting"):  # for memory that others have
                self.state = "waiting"
        if event.kind in ("started", "resumed"):
            self.pace.start(now_s)
        if event.kind in _ENDED:
            self.state, self.step, self.message = event.kind, event.step, event.message
            self.earlier = bool(event.data.get("earlier"))
        if isinstance(total := event.data.get("total_steps"), int):
            self.total = total
        if isinstance(loss := event.data.get("loss"), float):
            self.loss = loss
        if isinstance(loss := event.data.get("eval_loss"), float):
            self.eval_loss = loss
        if event.kind == "sample":
            if event.step != self._sampled_at:
                self.samples, self._sampled_at = [], event.step
            self.samples.append((str(event.data["prompt"]), str(event.data["reply"])))


class RunView:
    """All tasks of a run, in the order of its config."""

    def __init__(self, jobs: Iterable[JobSpec], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tasks = {job.name: TaskView(job.name, type_name(job.peft), job.logging_steps) for job in jobs}
        self.pace = Pace()
        self.note = ""
        self._clock = clock
        self.began = False

    def hear(self, event: RunEvent) -> None:
        """Take an event in; its time is now."""
        now_s = self._clock()
        task = self.tasks[event.task]
        if isinstance(event, StepResult):
            task.hear_step(event, now_s)
            self.pace.add(now_s, event.input_tokens)
        elif isinstance(event, EvalResult):
            task.eval_loss = event.loss
        else:
            if event.kind in ("started", "resumed") and not self.began:
                self.began = True
                self.pace.start(now_s)
            task.hear_event(event, now_s)

    def with_state(self, *states: str) -> list[TaskView]:
        return [task for task in self.tasks.values() if task.state in states]

    @property
    def eta_s(self) -> float | None:
        """Until the last task ends, at the present pace; rounds get shorter as tasks end, so at most. Where tasks wait
        for others, by the steps that all have left."""
        if not self.with_state("waiting"):
            return max((eta for task in self.tasks.values() if (eta := task.eta_s) is not None), default=None)
        left = sum((task.total or 0) - task.step for task in self.tasks.values() if not task.ended)
        rate = self.pace.steps_per_s
        return left / rate if rate else None
