"""Runs the passes of a slot together, so that one's collective is under way while another computes.

Each pass is a generator that yields at its collectives (`muxtune.parallel.steps`). The order in which they are resumed
is fixed before anything runs: that of `plan.overlap.list_schedule`, a queue of the ready subgraphs by what is to come
behind them, on the seconds that the plan expects. Whoever's turn it is is resumed once its own collective is done;
where that is not yet so, this rank waits, although another pass might be ready.

That is the price of safety. Ranks pair their collectives by the order in which they are started; were each to resume
whatever it finds ready, two ranks that see one message earlier or later would add up rows of different passes, or wait
for each other forever. An order that follows from the plan alone is the same on all of them. It costs time only where
durations differ from the plan's, and no order changes a bit of what is computed.

The plain twin runs one pass after another and waits for each collective at once.

What ran when is noted in `muxtune.plan.timeline`'s words, if somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import cycle

from muxtune.parallel.mesh import Sum
from muxtune.parallel.steps import Steps, Waiting
from muxtune.plan.cost import PassCost
from muxtune.plan.overlap import Chain, Subgraph, backward_chain, forward_chain, list_schedule
from muxtune.plan.pipeline import StageAction
from muxtune.plan.timeline import Event, Resource
from muxtune.spec.cluster import ClusterSpec

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a slot's work: what it is in the plan's words, whose, and how it runs."""

    action: StageAction
    tasks: tuple[str, ...]
    steps: Steps[None]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """What the plan expects of a pass through a stage: seconds of a layer, forward and backward, of a collective, and
    of what follows the layers on the way forward. Only their ratios matter."""

    forward_s: float
    backward_s: float
    collective_s: float
    exit_s: float = 0.0

    @classmethod
    def expected(cls, cost: PassCost, cluster: ClusterSpec, row_bytes: int) -> PassTimes:
        """What `muxtune.plan.simulate` expects of it. For an order, all ranks must have the same cost model."""
        collective_s = cluster.all_reduce_s(cost.rows * row_bytes)
        seconds = (cost.forward_s, cost.backward_s, cost.exit_s)
        forward_s, backward_s, exit_s = (one / cluster.speed for one in seconds)
        return cls(forward_s, backward_s, collective_s, exit_s)

    def forth(self, layers: int) -> Chain:
        """The way forward."""
        return forward_chain(layers, self.forward_s, self.collective_s, exit_s=self.exit_s)

    def back(self, layers: int) -> Chain:
        """The way back."""
        return backward_chain(layers, self.backward_s, self.collective_s)

    def both(self, layers: int) -> Chain:
        """A pass that comes back at once. Its first subgraph on the way back needs no collective to be there: it is one
        with what follows the layers."""
        forth = forward_chain(layers, self.forward_s, self.collective_s)
        first, *rest = self.back(layers)
        return (*forth, Subgraph(self.exit_s + first.compute_s, first.collective_s), *rest, Subgraph(0.0))


class Record:
    """What ran when on this stage, by `clock`."""

    def __init__(self, clock: Clock, stage: int = 0) -> None:
        self.clock = clock
        self._stage = stage
        self._began = clock()
        self._computed: list[Event] = []
        self._sums: list[tuple[Part, float, Sum | None, float]] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """In the order of their starts. A collective ends when its sum is there, and not later than it is used. The
        link does one thing at a time: one that is started while another is under way begins when that has ended."""
        found, free_s = list(self._computed), 0.0
        for part, start_s, own, used_s in sorted(self._sums, key=lambda one: one[1]):
            event = self._collective(part, max(start_s, free_s), own, used_s)
            free_s = event.end_s + self._began
            found.append(event)
        return tuple(sorted(found, key=lambda event: (event.start_s, event.end_s)))

    def computed(self, part: Part, start_s: float) -> None:
        """The part has computed from `start_s` until now."""
        resource = Resource("compute", self._stage)
        direction = part.action.direction
        span = start_s - self._began, self.clock() - self._began
        self._computed.append(Event(resource, *span, direction, part.action, part.tasks))

    def used(self, part: Part, start_s: float, waiting: Waiting) -> None:
        """The collective that the part began at `start_s` has been waited for."""
        self._sums.append((part, start_s, waiting if isinstance(waiting, Sum) else None, self.clock()))

    def _collective(self, part: Part, start_s: float, found: Sum | None, used_s: float) -> Event:
        ended = found.end_s if found is not None else None
        end_s = max(start_s, min(used_s, ended if ended is not None else used_s))
        resource = Resource("collective", self._stage)
        return Event(resource, start_s - self._began, end_s - self._began, "comm", part.action, part.tasks)


def order_of(chains: Sequence[Chain]) -> list[int]:
    """Whose turn it is, turn by turn, for passes that the plan expects to run like this."""
    return [launch.chain for launch in list_schedule(chains)]


def run_slot(passes: Sequence[Sequence[Part]], order: Iterable[int], record: Record | None = None) -> None:
    """Run all parts of each pass, in order.

    A turn of a pass that is done is left out; whoever is not when the order ends goes on in turn. Raises what a part
    raises, once no collective is under way any more, and RankError where another rank is lost.
    """
    running = [_Running(iter(parts), record) for parts in passes]
    try:
        for place in joined(order, cycle(range(len(running)))):
            running[place].resume()
            if all(one.done for one in running):
                return
    finally:
        for one in running:
            one.end()


def run_slot_plain(passes: Sequence[Sequence[Part]], record: Record | None = None) -> None:
    """The twin: one pass after another, and each collective waited for where it begins."""
    for parts in passes:
        running = _Running(iter(parts), record, plain=True)
        try:
            while not running.done:
                running.resume()
        finally:
            running.end()


@dataclass(slots=True)
class _Running:
    """A pass as far as it is."""

    parts: Iterator[Part]
    record: Record | None
    plain: bool = False
    done: bool = False
    _part: Part | None = None
    _waiting: Waiting | None = None
    _started_s: float = field(default=0.0)

    def resume(self) -> None:
        """Go on to the next collective, or to the end."""
        if self.done:
            return
        self._settle()
        while True:
            if self._part is None:
                self._part = next(self.parts, None)
                if self._part is None:
                    self.done = True
                    return
            if self._next(self._part):
                return
            self._part = None

    def end(self) -> None:
        """Leave nothing under way: another rank may still count on it, and the tensor has to stay."""
        if self._part is not None:
            self._part.steps.close()
        self.done = True
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.wait()

    def _next(self, part: Part) -> bool:
        """Whether the part has come to a collective; else it is done."""
        record = self.record
        start_s = record.clock() if record is not None else 0.0
        waiting = next(part.steps, None)
        if record is not None:
            record.computed(part, start_s)
        if waiting is None:
            return False
        self._waiting = waiting
        if record is not None:
            self._started_s = record.clock()
            if isinstance(waiting, Sum):
                waiting.time_with(record.clock)
        if self.plain:
            self._settle()
        return True

    def _settle(self) -> None:
        if self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        waiting.wait()
        if self.record is not None and self._part is not None:
            self.record.used(self._part, self._started_s, waiting)
