"""What a simulated plan does when, and what follows from it: throughput, utilisation, bubbles and stalls.

Of the time from the start to the end of everything, a stage
    computes    forward, backward or step                               utilisation
    stalls      does not, while a collective of its own runs            stall share
    idles       does neither: it waits for another stage, or is done    bubble share
The three shares add up to 1, of a stage and of all. All devices of a stage do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from muxtune.plan.pipeline import StageAction

ResourceKind = Literal["compute", "collective", "forward link", "backward link"]
Work = Literal["forward", "backward", "comm", "send", "step"]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Resource:
    """What does one thing at a time: a stage's devices, the link between these, or the one to a neighbour: "forward
    link" to the next stage, "backward link" to the one before."""

    kind: ResourceKind
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} {self.kind}"


@dataclass(frozen=True, slots=True)
class Event:
    """`action`: what it is part of (hTask, micro-batch, iteration; the way); `tasks`: the hTask's."""

    resource: Resource
    start_s: float
    end_s: float
    what: Work
    action: StageAction
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Attributes:
    stages: how many.
    events: in an order in which each comes after what it needs.
    wall_s: the end of the last.
    iterations, tokens: how many there are; trained rows of all of them.
    layers: of each stage.
    peak_bytes: the most that one device of each stage holds; empty where no memory model was given.
    """

    stages: int
    events: tuple[Event, ...]
    wall_s: float
    iterations: int
    tokens: int
    layers: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Of each stage."""
        return tuple(self._share(_length(self._spans("compute", stage))) for stage in range(self.stages))

    @property
    def stall_share(self) -> float:
        """Of all stages' time."""
        return sum(self._share(self._stalled_s(stage)) for stage in range(self.stages)) / self.stages

    @property
    def bubble_share(self) -> float:
        """Of all stages' time."""
        return max(0.0, 1 - sum(self.utilisation) / self.stages - self.stall_share) if self.wall_s else 0.0

    def stepped_s(self, htask: int, iteration: int) -> float:
        """When an hTask's step of an iteration is done on all stages."""
        return max(
            event.end_s
            for event in self.events
            if event.what == "step" and (event.action.htask, event.action.iteration) == (htask, iteration)
        )

    def _share(self, seconds: float) -> float:
        return seconds / self.wall_s if self.wall_s else 0.0

    def _spans(self, kind: ResourceKind, stage: int) -> list[Span]:
        wanted = Resource(kind, stage)
        return [(event.start_s, event.end_s) for event in self.events if event.resource == wanted]

    def _stalled_s(self, stage: int) -> float:
        collectives = self._spans("collective", stage)
        return _length(collectives) - _common(self._spans("compute", stage), collectives)


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Seconds in both, each of spans that do not meet."""
    left, right = sorted(left), sorted(right)
    common, one, other = 0.0, 0, 0
    while one < len(left) and other < len(right):
        common += max(0.0, min(left[one][1], right[other][1]) - max(left[one][0], right[other][0]))
        if left[one][1] <= right[other][1]:
            one += 1
        else:
            other += 1
    return common
