"""From the participants of a round to its schedule: who runs with whom, and in which order.

`fuse-all` fuses participants in space while their largest chunks together stay within `fuse_tokens` - the memory that
one pass may take - and begins another hTask where they would not; hTasks run one after another. `sequential` runs each
participant alone. Micro-batch c of an hTask is the c-th chunk of every member that still has one. Each task is stepped
as soon as its last chunk is done. Nothing here can change what a task computes: its chunks come ready-made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from muxtune.plan.types import (
    Action,
    LossKind,
    LossSpec,
    MicroBatch,
    OptimStep,
    RoundSchedule,
    SequenceRef,
    WorkItem,
    WorkKind,
)

Policy = Literal["sequential", "fuse-all"]


@dataclass(frozen=True, slots=True)
class Participant:
    """What one task brings to a round: its chunks, in order, of sequences of `source`.

    `denominator`, `loss` and `beta` are what `LossSpec` says of them; `virtual_rows` are those that its adapter puts
    before each sequence.
    """

    task: str | None
    source: str
    chunks: tuple[tuple[SequenceRef, ...], ...]
    denominator: int = 1
    virtual_rows: int = 0
    loss: LossKind = "sft"
    beta: float = 0.0

    @property
    def widest(self) -> int:
        """Rows of the largest chunk."""
        return max((sum(ref.length + self.virtual_rows for ref in chunk) for chunk in self.chunks), default=0)


def derive_round(
    number: int, participants: Sequence[Participant], *, policy: Policy, fuse_tokens: int, kind: WorkKind = "train"
) -> RoundSchedule:
    """One optimizer step of each participant (or, for a forward-only `kind`, one pass over its chunks)."""
    actions: list[Action] = []
    for htask, members in enumerate(fuse(participants, policy, fuse_tokens)):
        for chunk in range(max(len(member.chunks) for member in members)):
            running = [member for member in members if chunk < len(member.chunks)]
            actions.append(MicroBatch(htask, chunk, tuple(_item(member, chunk, kind) for member in running)))
            if kind == "train":
                done = [member for member in running if chunk == len(member.chunks) - 1]
                actions.extend(OptimStep(member.task) for member in done if member.task is not None)
    return RoundSchedule(number, tuple(actions))


def fuse(participants: Sequence[Participant], policy: Policy, fuse_tokens: int) -> list[list[Participant]]:
    """hTasks in order: each participant alone, or as many neighbours as fit `fuse_tokens`."""
    if policy == "sequential":
        return [[participant] for participant in participants if participant.chunks]
    htasks: list[list[Participant]] = []
    used = 0
    for participant in participants:
        if not participant.chunks:
            continue
        if not htasks or used + participant.widest > fuse_tokens:
            htasks.append([])
            used = 0
        htasks[-1].append(participant)
        used += participant.widest
    return htasks


def _item(member: Participant, chunk: int, kind: WorkKind) -> WorkItem:
    compares = kind == "train" or (kind == "eval" and member.loss == "dpo")
    loss = LossSpec(member.denominator, member.loss, member.beta) if compares else None
    return WorkItem(member.task, kind, member.source, member.chunks[chunk], loss)
