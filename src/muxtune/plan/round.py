"""From the participants of a round to its schedule: who runs with whom, and in which order.

`fuse-all` fuses participants in space while their largest chunks together stay within `fuse_tokens` - the memory that
one pass may take - and begins another hTask where they would not; hTasks run one after another. `padded` fuses in the
same way, but pads every sequence of a pass to its longest, as systems without packing do. `sequential` runs each
participant alone. `muxtune` fuses those that a `Plan` fuses, in its order and within the same bound; who is in no plan
follows, fused as by `fuse-all`. Micro-batch c of an hTask is the c-th chunk of every member that still has one; but a
pass trains or does not, so chunks that carry a cut sequence forward go first, without the others'. Each task is stepped
as soon as its last chunk is done. Nothing here can change what a task computes: its chunks come ready-made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from muxtune.plan.types import (
    Action,
    LossKind,
    LossSpec,
    MicroBatch,
    OptimStep,
    Plan,
    Policy,
    RoundSchedule,
    SequenceRef,
    WorkItem,
    WorkKind,
)


@dataclass(frozen=True, slots=True)
class Participant:
    """What one task brings to a round: its chunks, in order, of sequences of `source`.

    `denominator`, `loss` and `beta` are what `LossSpec` says of them; `virtual_rows` are those that its adapter puts
    before each sequence. The chunks `carried` go forward only, whatever the round is.
    """

    task: str | None
    source: str
    chunks: tuple[tuple[SequenceRef, ...], ...]
    denominator: int = 1
    virtual_rows: int = 0
    loss: LossKind = "sft"
    beta: float = 0.0
    carried: frozenset[int] = frozenset()

    @property
    def widest(self) -> int:
        """Rows of the largest chunk."""
        return max((sum(self._rows(ref) for ref in chunk) for chunk in self.chunks), default=0)

    def longest(self, chunk: int) -> int:
        """Rows of the longest sequence of a chunk."""
        return max(self._rows(ref) for ref in self.chunks[chunk])

    def _rows(self, ref: SequenceRef) -> int:
        return ref.length + (self.virtual_rows if ref.start == 0 else 0)


def derive_round(
    number: int,
    participants: Sequence[Participant],
    *,
    policy: Policy,
    fuse_tokens: int,
    kind: WorkKind = "train",
    recompute: bool = False,
    plan: Plan | None = None,
) -> RoundSchedule:
    """One optimizer step of each participant (or, for a forward-only `kind`, one pass over its chunks)."""
    actions: list[Action] = []
    for htask, members in enumerate(fuse(participants, policy, fuse_tokens, plan)):
        for number_in_htask, running in enumerate(_passes(members)):
            items = tuple(_item(member, chunk, kind) for member, chunk in running)
            width = max(member.longest(chunk) for member, chunk in running) if policy == "padded" else 0
            trains = any(item.kind == "train" for item in items)
            actions.append(MicroBatch(htask, number_in_htask, items, width, recompute and trains))
            if kind == "train":
                done = [member for member, chunk in running if chunk == len(member.chunks) - 1]
                actions.extend(OptimStep(member.task) for member in done if member.task is not None)
    return RoundSchedule(number, tuple(actions))


def _passes(members: Sequence[Participant]) -> Iterator[list[tuple[Participant, int]]]:
    """Who runs which of their chunks together, pass by pass."""
    done = [0] * len(members)
    while waiting := [place for place, member in enumerate(members) if done[place] < len(member.chunks)]:
        carrying = [place for place in waiting if done[place] in members[place].carried]
        running = carrying or waiting
        yield [(members[place], done[place]) for place in running]
        for place in running:
            done[place] += 1


def fuse(
    participants: Sequence[Participant], policy: Policy, fuse_tokens: int, plan: Plan | None = None
) -> list[list[Participant]]:
    """hTasks in order: each participant alone, or as many neighbours - of those that the plan fuses - as fit
    `fuse_tokens`."""
    running = [participant for participant in participants if participant.chunks]
    if policy == "sequential":
        return [[participant] for participant in running]
    if policy == "padded":
        return neighbours(running, _padded_rows, fuse_tokens)
    return [htask for planned in _planned(running, plan) for htask in neighbours(planned, _packed_rows, fuse_tokens)]


def _planned(participants: Sequence[Participant], plan: Plan | None) -> list[list[Participant]]:
    """By the plan's hTasks, in its order; then all that are in none."""
    by_name = {participant.task: participant for participant in participants}
    groups = [[by_name.pop(name) for name in htask.tasks if name in by_name] for htask in (plan.htasks if plan else ())]
    return [*filter(None, groups), list(by_name.values())]


Member = TypeVar("Member")


def neighbours(
    members: Sequence[Member], rows_of: Callable[[Sequence[Member]], int], most_rows: int | None
) -> list[list[Member]]:
    """In order, as many together as have no more than `most_rows` rows."""
    htasks: list[list[Member]] = []
    for member in members:
        if not htasks or (most_rows is not None and rows_of([*htasks[-1], member]) > most_rows):
            htasks.append([])
        htasks[-1].append(member)
    return htasks


def _packed_rows(members: Sequence[Participant]) -> int:
    """Of the largest pass there could be."""
    return sum(member.widest for member in members)


def _padded_rows(members: Sequence[Participant]) -> int:
    """The same where every sequence is as long as the longest of all."""
    longest = max(member.longest(chunk) for member in members for chunk in range(len(member.chunks)))
    return longest * sum(max(map(len, member.chunks)) for member in members)


def _item(member: Participant, chunk: int, kind: WorkKind) -> WorkItem:
    if chunk in member.carried:
        kind = "score" if member.loss == "dpo" else "carry"
    compares = kind in ("train", "score") or (kind == "eval" and member.loss == "dpo")
    loss = LossSpec(member.denominator, member.loss, member.beta) if compares else None
    return WorkItem(member.task, kind, member.source, member.chunks[chunk], loss)
