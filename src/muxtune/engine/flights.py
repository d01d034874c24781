"""What a stage has under way while a schedule runs: passes, messages, and what has come of both.

The boundary: values and queues; who does what with them is `muxtune.engine.pipelined`'s business.

Legend: T packed rows, D model, U rows that predict.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muxtune.engine.packing import PackedBatch
from muxtune.models.attach import Pass
from muxtune.models.loss import TokenLosses
from muxtune.parallel.chain import LayerChain
from muxtune.parallel.mesh import Exchange
from muxtune.parallel.pipe import Link
from muxtune.plan.pipeline import StageAction
from muxtune.plan.timeline import Event, Resource
from muxtune.plan.turns import Turn
from muxtune.plan.types import Action, ActionRecord, MicroBatch, OptimStep, RoundSchedule, tasks_of

AHEAD = 2  # messages on the way forward that are received before their turn
BEHIND = 6  # messages on the way back that are held before the oldest is waited for
Shape = tuple[tuple[int, ...], torch.dtype]


class StageRecord:
    """When this stage computed, in `muxtune.plan.timeline`'s words, by `clock`."""

    def __init__(self, clock: Callable[[], float], stage: int) -> None:
        self.clock = clock
        self.events: list[Event] = []
        self._resource = Resource("compute", stage)

    def computed(self, action: StageAction, tasks: tuple[str, ...], start_s: float) -> None:
        """From `start_s` until now."""
        self.events.append(Event(self._resource, start_s, self.clock(), action.direction, action, tasks))


@dataclass(slots=True)
class Flight:
    """A pass that is under way on this stage.

    Attributes:
        first_TD: the rows that the first stage's layers begin with, and what made them.
        last_TD: those that the last stage's layers ended with, a leaf of what follows.
        ends: rows that predict, and their gradient.
        sent: rows that went on.
        awaited: what the next stage will send back, in order.
    """

    batch: MicroBatch
    packed: PackedBatch
    current: Pass
    chain: LayerChain
    first_TD: Tensor
    last_TD: Tensor
    start_s: float
    hidden_TD: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None
    losses: TokenLosses | None = None
    sent: Exchange | None = None
    awaited: deque[Exchange] = field(default_factory=deque)


@dataclass(slots=True)
class Run:
    """A schedule while it runs. `closes`: of passes, the steps whose gradient is whole with them."""

    schedule: RoundSchedule
    began: float
    incoming: Incoming | None
    closes: Mapping[int, tuple[int, ...]]
    flights: dict[int, Flight] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)  # of steps, on the first stage
    records: dict[int, ActionRecord] = field(default_factory=dict)
    sent_back: deque[Exchange] = field(default_factory=deque)
    sent_norms: list[Exchange] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began

    def batch(self, index: int) -> MicroBatch:
        """Action `index`."""
        action = self.schedule.actions[index]
        assert isinstance(action, MicroBatch)
        return action


class Incoming:
    """Messages of the way forward, received ahead of their turn."""

    def __init__(self, link: Link, shapes: Iterator[Shape], device: torch.device) -> None:
        self._link, self._shapes, self._device = link, shapes, device
        self._posted: deque[Exchange] = deque()
        for _ in range(AHEAD):
            self._post()

    def take(self) -> Exchange:
        """The next one, under way; another is posted for it."""
        message = self._posted.popleft()
        self._post()
        return message

    def _post(self) -> None:
        shape = next(self._shapes, None)
        if shape is not None:
            self._posted.append(self._link.receive(*shape, self._device))


def told(actions: Sequence[Action], turn: Turn) -> tuple[StageAction, tuple[str, ...]]:
    """A turn in the words of a plan; a step is of the last pass of its task."""
    action = actions[turn.index]
    if isinstance(action, OptimStep):
        own = [one for one in actions[: turn.index] if isinstance(one, MicroBatch) and action.task in tasks_of(one)]
        htask, chunk = (own[-1].htask, own[-1].chunk) if own else (0, 0)
        return StageAction("step", htask, chunk, 0), (action.task,)
    tasks = tuple(task for task in tasks_of(action) if task is not None)
    return StageAction(turn.direction, action.htask, action.chunk, 0), tasks
