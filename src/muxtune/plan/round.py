"""From the participants of a round to its schedule: who runs with whom, and in which order.

`fuse-all` fuses participants in space while their largest chunks together stay within `fuse_tokens` - the memory that
one pass may take - and begins another hTask where they would not; hTasks run one after another. `padded` fuses in the
same way, but pads every sequence of a pass to its longest, as systems without packing do. `sequential` runs each
participant alone. `muxtune` fuses those that a `Plan` fuses, in its order and within the same bound; who is in no plan
follows, fused as by `fuse-all`. Micro-batch c of an hTask is the c-th chunk of every member that still has one; but a
pass trains or does not, so chunks that carry a cut sequence forward go first, without the others'. Each task is stepped
as soon as its last chunk is done. Nothing here can change what a task computes: its chunks come ready-made.

Activations of what is carried are kept from where on the rows of all members' pieces up to their tails stay within
`keep_tokens`; what comes before that runs twice. What is kept trains in passes of the same pieces, so the way back
mirrors the way forward:

    A and B are carried in 3 and 2 pieces   keep (A0 B0) (A1 B1) (A2)
    both tails, and whoever else waits      train (A3 B2 C0)
    from what was kept                      train (A2) (A1 B1) (A0 B0)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from muxtune.plan.types import (
    Action,
    LossKind,
    LossSpec,
    MicroBatch,
    OptimStep,
    Plan,
    RoundSchedule,
    SequenceRef,
    WorkItem,
    WorkKind,
)
from muxtune.spec.policy import Policy

_Running = list[tuple["Participant", int]]  # who runs which of its chunks


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
        return max(map(self.rows, range(len(self.chunks))), default=0)

    def longest(self, chunk: int) -> int:
        """The most rows that a sequence of a chunk brings."""
        return max(ref.rows(self.virtual_rows) for ref in self.chunks[chunk])

    def rows(self, chunk: int) -> int:
        """Rows of a chunk."""
        return sum(ref.rows(self.virtual_rows) for ref in self.chunks[chunk])

    def mirrored(self, chunk: int) -> int:
        """How many chunks from `chunk` on are carried and, after one more, train in reverse order just as they are.

        A dpo pair has none: both its sequences go forward before either trains.
        """
        count = 0
        while chunk + count in self.carried:
            count += 1
        forth = self.chunks[chunk : chunk + count]
        back = self.chunks[chunk + count + 1 : chunk + 2 * count + 1]
        return count if self.loss != "dpo" and back == forth[::-1] else 0


def derive_round(
    number: int,
    participants: Sequence[Participant],
    *,
    policy: Policy,
    fuse_tokens: int,
    kind: WorkKind = "train",
    recompute: bool = False,
    plan: Plan | None = None,
    spared: Collection[str | None] = (),
    keep_tokens: int = 0,
) -> RoundSchedule:
    """One optimizer step of each participant (or, for a forward-only `kind`, one pass over its chunks).

    A pass that trains recomputes where `recompute` says so or one of its tasks is to be `spared` memory; of such tasks
    nothing is kept.
    """
    actions: list[Action] = []
    lean = {one.task for one in participants if recompute or one.task in spared}
    for htask, members in enumerate(fuse(participants, policy, fuse_tokens, plan)):
        for number_in_htask, (running, keep) in enumerate(_passes(members, policy, lean, keep_tokens)):
            items = tuple(_item(member, chunk, kind) for member, chunk in running)
            width = _width(running) if policy == "padded" else 0
            trains = any(item.kind == "train" for item in items)
            again = trains and any(member.task in lean for member, _ in running)
            actions.append(MicroBatch(htask, number_in_htask, items, width, again, keep))
            if kind == "train":
                done = [member for member, chunk in running if chunk == len(member.chunks) - 1]
                actions.extend(OptimStep(member.task) for member in done if member.task is not None)
    return RoundSchedule(number, tuple(actions))


def _passes(
    members: Sequence[Participant], policy: Policy, lean: Collection[str | None], keep_tokens: int
) -> Iterator[tuple[_Running, bool]]:
    """Who runs which of their chunks together, pass by pass, and whether the pass keeps or resumes what is kept."""
    done = [0] * len(members)

    def take(places: Sequence[int]) -> _Running:
        running = [(members[place], done[place]) for place in places]
        for place in places:
            done[place] += 1
        return running

    while waiting := [place for place, member in enumerate(members) if done[place] < len(member.chunks)]:
        carrying = [place for place in waiting if done[place] in members[place].carried]
        depths = {place: members[place].mirrored(done[place]) for place in carrying if members[place].task not in lean}
        forth = _levels({place: depth for place, depth in depths.items() if depth})
        ahead = [[(members[place], done[place] + level) for place in places] for level, places in enumerate(forth)]
        if sum(_rows_of(running, policy) for running in ahead) > keep_tokens:
            forth = []
        others = [place for place in carrying if not forth or place not in forth[0]]
        if others or not forth:
            yield take(others or waiting), False
            continue
        for places in forth:
            yield take(places), True
        yield take(waiting), False
        for places in reversed(forth):
            yield take(places), True


def _levels(depths: Mapping[int, int]) -> list[list[int]]:
    """Who takes part in level 0, 1, ... of those that have `depths` of them."""
    return [
        [place for place, depth in depths.items() if depth > level] for level in range(max(depths.values(), default=0))
    ]


def _width(running: _Running) -> int:
    """Of a padded pass."""
    return max(member.longest(chunk) for member, chunk in running)


def _rows_of(running: _Running, policy: Policy) -> int:
    """Of a pass."""
    if policy == "padded":
        return _width(running) * sum(len(member.chunks[chunk]) for member, chunk in running)
    return sum(member.rows(chunk) for member, chunk in running)


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
