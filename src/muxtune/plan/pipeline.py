"""The pipeline template: which stage runs what, in which order, when several hTasks share a pipeline (1F1B).

The unit is a *slot*: passes that a stage runs together. The order in which slots go forward is the same on every
stage: iteration by iteration, bucket by bucket. A bucket has as many slots as its longest member has passes; a member
with fewer takes the consecutive ones that have least so far, since slots of unlike length make bubbles. `together`
makes one slot of all passes that share it (they overlap inside a stage: `muxtune.plan.overlap`); otherwise each is a
slot by itself, one after another. So members of a bucket fill each other's gaps, and the other buckets those between a
bucket's iterations. Slots come back in the same order: messages between two stages arrive in the order in which they
are awaited.

Slot n has a tick t(n): the one after that of slot n - 1, or later, S ticks after a slot whose way back it awaits on S
stages: a new iteration awaits its hTask's step, a pass that only carries its hTask's passes that train, as a task holds
the keys and values of one cut sequence. What stage s does has a date, as if all slots and both ways took equal time;
1F1B (Narayanan et al. 2019, 2021) is all stages' work in the order of these dates:

    forward     2 t + s
    backward    2 t + 2 S - 1 - s
    step        2 t + 2 S + s       after the last backward: it needs the norm over all stages, which stage 0 completes

memory      Between the forward and the backward of a slot on stage s lie the forwards of S - s - 1 others at most: the
            stage holds no more than S - s slots.
deadlock    There is none. What an action needs has an earlier date, or is a step at the same, which comes first. Stages
            that run their own parts of such an order and wait only to receive (sends are buffered) cannot wait in a
            circle: of what has not run yet, the first in the order of dates has all that it needs.
bubbles     Of M equal slots those of filling and draining, (S - 1) / (M + S - 1). Where an iteration follows another,
            the other hTasks' slots fill the S ticks between; the share of ticks that stay empty is a bubble (LoRAPP's,
            mLoRA, VLDB 2025). A step comes s slots after the stage's own last backward: nobody waits for the norm.

The boundary: integers in, integers out; times are `muxtune.plan.simulate`'s. Cost: n log n for n stages x slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True)
class StageAction:
    """What a stage does with micro-batch `chunk` of an hTask; that of a step is the last one."""

    direction: Direction
    htask: int
    chunk: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What a stage runs together, in one direction."""

    stage: int
    actions: tuple[StageAction, ...]

    @property
    def direction(self) -> Direction:
        return self.actions[0].direction


@dataclass(frozen=True, slots=True)
class Template:
    """`order`: everything that all stages do, each after what it needs."""

    stages: int
    order: tuple[Slot, ...]

    def of_stage(self, stage: int) -> tuple[Slot, ...]:
        """What one stage does, in order."""
        return tuple(slot for slot in self.order if slot.stage == stage)

    def actions(self, stage: int) -> tuple[StageAction, ...]:
        return tuple(action for slot in self.of_stage(stage) for action in slot.actions)


def make_template(
    trains: Sequence[Sequence[bool]],
    buckets: Sequence[Sequence[int]],
    stages: int,
    *,
    iterations: int = 1,
    together: bool = False,
    pass_s: Sequence[float] = (),
) -> Template:
    """The order of so many iterations of all hTasks.

    Args:
        trains: of each hTask, of each pass of an iteration, whether it trains; one that does not only goes forward.
            The last one trains.
        buckets: the places of all hTasks, each in one bucket.
        together: whether members of a bucket share slots.
        pass_s: of each hTask, what one of its passes takes on average, in any unit; equal where nothing is said.
    """
    assert stages >= 1 and iterations >= 1, (stages, iterations)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(trains))), "not a partition"
    assert all(passes and passes[-1] for passes in trains), "an hTask's last pass trains"
    weights = tuple(pass_s) or (1.0,) * len(trains)
    shared = [slot for bucket in buckets for slot in _shared([len(passes) for passes in trains], bucket, weights)]
    slots = shared if together else [[one] for slot in shared for one in slot]
    dated = sorted(_dated(trains, slots, stages, iterations), key=lambda one: (one[0], one[1].direction != "step"))
    return Template(stages, tuple(slot for _, slot in dated))


def _shared(passes: Sequence[int], bucket: Sequence[int], weights: Sequence[float]) -> list[list[tuple[int, int]]]:
    """The slots of a bucket: (hTask, pass) of who could run together, in the bucket's order."""
    slots: list[list[tuple[int, int]]] = [[] for _ in range(max(passes[htask] for htask in bucket))]
    loads = [0.0] * len(slots)
    for htask in sorted(bucket, key=lambda htask: (-passes[htask], -weights[htask])):
        own = passes[htask]
        first = min(range(len(slots) - own + 1), key=lambda first: max(loads[first : first + own]))
        for chunk in range(own):
            slots[first + chunk].append((htask, chunk))
            loads[first + chunk] += weights[htask]
    order = {htask: place for place, htask in enumerate(bucket)}
    return [sorted(slot, key=lambda one: order[one[0]]) for slot in slots]


def _dated(
    trains: Sequence[Sequence[bool]], slots: Sequence[Sequence[tuple[int, int]]], stages: int, iterations: int
) -> Iterator[tuple[int, Slot]]:
    """Everything, each with its date; `slots`: those of an iteration."""
    tick = -1
    back = [-stages] * len(trains)  # of each hTask, the tick of its last slot that comes back
    for iteration in range(iterations):
        for members in slots:
            awaiting = [htask for htask, chunk in members if chunk == 0 or not trains[htask][chunk]]
            tick = max([tick + 1, *(back[htask] + stages for htask in awaiting)])
            trained = [(htask, chunk) for htask, chunk in members if trains[htask][chunk]]
            ended = [(htask, chunk) for htask, chunk in members if chunk == len(trains[htask]) - 1]
            for htask, _ in trained:
                back[htask] = tick
            for stage in range(stages):
                yield 2 * tick + stage, Slot(stage, _actions("forward", members, iteration))
                if trained:
                    date = 2 * (tick + stages) - 1 - stage
                    yield date, Slot(stage, _actions("backward", trained, iteration))
                for step in ended:
                    yield 2 * (tick + stages) + stage, Slot(stage, _actions("step", [step], iteration))


def _actions(direction: Direction, members: Sequence[tuple[int, int]], iteration: int) -> tuple[StageAction, ...]:
    return tuple(StageAction(direction, htask, chunk, iteration) for htask, chunk in members)
