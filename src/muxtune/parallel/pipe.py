"""Ranks in a row: the mesh of tp x pp ranks, and what neighbouring stages of a pipeline send each other.

    rank = stage * tp + place in the stage      tp = 2, pp = 2:   [0 1] -> [2 3]

Ranks of a stage hold its layers together (`muxtune.parallel.mesh`); those of the same place in each stage are a pipe.
A message is one contiguous tensor whose shape both ends know. Sends and receives are started at once and waited for
later; what is waited for is a `Waiting` of `muxtune.parallel.steps`. The two directions of a link are groups of their
own, so that on a device that runs a group's messages in order neither holds up the other; within a direction messages
are received in the order in which they are sent, and carry their number besides.

A message moves once its receive is posted, whatever the receiver computes meanwhile: post early. Waiting is bounded by
the groups' timeout, and ends in a RankError as every exchange does.

The boundary: `torch.distributed` as it is. What is sent when is the business of `muxtune.engine.pipelined`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from muxtune.errors import ConfigError
from muxtune.parallel.mesh import ALONE, CPU, Exchange, TensorAxis, answered


@dataclass(slots=True)
class Link:
    """One direction between two neighbours, as one of its ends sees it. `peer` is the other's place in `world`."""

    peer: int
    world: TensorAxis
    group: ProcessGroup
    _number: int = 0

    def send(self, value: Tensor) -> Exchange:
        """Start to send; the tensor must not change until it is done."""
        return self._started(value.contiguous(), send=True)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Exchange:
        """Start to receive the next message of this direction."""
        return self._started(torch.empty(shape, dtype=dtype, device=device), send=False)

    def _started(self, value: Tensor, *, send: bool) -> Exchange:
        number, self._number = self._number, (self._number + 1) % 2**30
        start = dist.isend if send else dist.irecv
        with answered(self.world.rank, self.world.size):
            work = start(value, self.peer, group=self.group, tag=number)
        return Exchange(value, self.world, work)


@dataclass(frozen=True, slots=True)
class PipeAxis:
    """This rank's place in its pipe: stage `stage` of `stages`.

    Attributes:
        pipe: all stages, for the rare exchange that concerns them all.
        rows_in, rows_out: from the stage before and to the next one, on the way forward; None at the ends.
        back_in, back_out: from the next one and to the one before, on the way back.
    """

    stage: int = 0
    stages: int = 1
    pipe: TensorAxis = ALONE
    rows_in: Link | None = None
    rows_out: Link | None = None
    back_in: Link | None = None
    back_out: Link | None = None

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


ONE_STAGE = PipeAxis()


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among tp x pp: `tensor` those of its stage, `pipe` those of its place in each stage."""

    world: TensorAxis
    tensor: TensorAxis = ALONE
    pipe: PipeAxis = field(default_factory=PipeAxis)


def make_mesh(world: TensorAxis, *, tp: int, pp: int, timeout_s: float, device: torch.device = CPU) -> Mesh:
    """The mesh of all ranks of `world`, which all make it together; every link has carried a message when it is there.
    Raises ConfigError where they are not tp x pp."""
    if tp * pp != world.size:
        raise ConfigError(f"{world.size} ranks are not tp {tp} x pp {pp}", where="tp, pp", hint=f"start {tp * pp}")
    stage, place = divmod(world.rank, tp)
    tensor, pipe = ALONE, ALONE
    for one in range(pp):
        group = _group([one * tp + other for other in range(tp)], timeout_s)
        if one == stage and group is not None:
            tensor = TensorAxis(place, tp, group)
    links: dict[tuple[int, bool], ProcessGroup | None] = {}
    for other in range(tp):
        group = _group([one * tp + other for one in range(pp)], timeout_s)
        if other == place and group is not None:
            pipe = TensorAxis(stage, pp, group)
        for one in range(pp - 1):
            for forward in (True, False):
                made = _group([one * tp + other, (one + 1) * tp + other], timeout_s)
                if other == place:
                    links[one, forward] = made

    def link(lower: int, peer_stage: int, *, forward: bool) -> Link | None:
        group = links.get((lower, forward))
        return None if group is None else Link(peer_stage * tp + place, world, group)

    own = PipeAxis(
        stage,
        pp,
        pipe,
        rows_in=link(stage - 1, stage - 1, forward=True),
        rows_out=link(stage, stage + 1, forward=True),
        back_in=link(stage, stage + 1, forward=False),
        back_out=link(stage - 1, stage - 1, forward=False),
    )
    _open(own, device)
    return Mesh(world, tensor, own)


def _open(axis: PipeAxis, device: torch.device) -> None:
    """Send a word over every link, one after the other: NCCL connects two ranks when they first speak, and holds both
    up until they do, which stages at different places of a schedule could wait for in a circle."""
    for link, sends in ((axis.rows_in, False), (axis.back_out, True), (axis.rows_out, True), (axis.back_in, False)):
        if link is not None:
            word = torch.zeros(1, device=device)
            (link.send(word) if sends else link.receive((1,), word.dtype, device)).wait()


def _group(ranks: list[int], timeout_s: float) -> ProcessGroup | None:
    """None for one rank alone. All ranks make each group, members or not, in the same order."""
    if len(ranks) == 1:
        return None
    made: ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    return made
