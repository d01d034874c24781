"""What a run tells whoever listens: values, JSON-safe, the same for the CLI, metrics files and (later) the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "queued", "started", "resumed", "paused", "checkpoint", "warning", "sample", "completed", "failed", "cancelled"
]


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of dpo: beta times how much likelier than the backbone the task's model holds a response, on average of pairs."""

    chosen: float
    rejected: float

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step of one task. `loss` is the mean over the step's `tokens` trained tokens; in dpo, over its
    pairs, and `accuracy` is the share of pairs whose margin is positive."""

    task: str
    step: int  # 1-based: the number of optimizer steps done, this one included
    loss: float
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # trained tokens of the step's batch
    input_tokens: int  # tokens that went in: of each sequence those before its last target, prompts included
    accuracy: float  # of next-token argmax over trained tokens
    epoch: float
    time_s: float  # wall time of the round that held the step
    rewards: Rewards | None = None  # of dpo


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The validation set of one task, at `step` optimizer steps done."""

    task: str
    step: int
    loss: float
    accuracy: float
    tokens: int
    rewards: Rewards | None = None


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Something that happened to a task; `message` is for people, `data` for programs.

    Never holds example text. A `sample` has the `prompt`, one of the job's `sample_prompts`, and the `reply`; the
    `queued` of a job that is about to train has its `total_steps`.
    """

    kind: EventKind
    task: str
    step: int
    message: str = ""
    data: Mapping[str, object] = field(default_factory=dict)


RunEvent = StepResult | EvalResult | TaskEvent
