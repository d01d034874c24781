"""The ranks that hold one stage together, and what they say to each other: sums and maxima of tensors.

A sum may be waited for at once (`sum_`) or later (`start_sum`). Ranks pair exchanges by the order in which they are
started, so that order has to be the same on all of them, whichever is waited for first. On a GPU nothing of this blocks
the process: NCCL runs on a stream of its own, and to wait for an exchange is to have the stream that computes wait for
its event, so that what was enqueued before overlaps with it.

Everything that leaves a rank goes through `TensorAxis`, so that a rank which dies or hangs ends the others in one way:
gloo's sockets notice a dead neighbour at once and a silent one after the group's timeout, and either becomes a
`RankError`. A sum has the same bits on every rank: gloo adds each element up in one place and sends it round.

The boundary: `torch.distributed` as it is. Who starts the ranks is the business of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from muxtune.errors import RankError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """This rank's place among `size`, and the group it speaks to."""

    rank: int
    size: int
    group: ProcessGroup | None = None

    def start_sum(self, value: Tensor) -> Sum:
        """Begin the sum over the ranks, in place: nobody may touch `value`, which is contiguous, until it is done."""
        if self.size == 1:
            return Sum(value, self)
        with answered(self.rank, self.size):
            work = dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return Sum(value, self, work)

    def sum_(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in place; `value` is contiguous and of one shape on all of them."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def max_(self, value: Tensor) -> Tensor:
        """The maximum over the ranks, in place."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            with answered(self.rank, self.size):
                dist.all_reduce(value, op=how, group=self.group)
        return value


@dataclass(slots=True)
class Exchange:
    """A sum, a send or a receive in flight (`muxtune.parallel.steps.Waiting`), seen from this rank of `axis`; nobody
    may touch `value` until it has been waited for."""

    value: Tensor
    axis: TensorAxis
    work: dist.Work | None = None

    def done(self) -> bool:
        """Not more than a lower bound: gloo does not know of a send or a receive before it is asked to wait."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Raises RankError where another rank is lost."""
        if self.work is not None:
            with answered(self.axis.rank, self.axis.size):
                self.work.wait()
            self.work = None


@dataclass(slots=True)
class Sum(Exchange):
    """A sum in flight; `value` is it when it is done."""

    _ends: list[float] = field(default_factory=list)

    def time_with(self, clock: Callable[[], float]) -> None:
        """Note when it is done: `end_s` is then known soon after."""
        if self.work is None:
            self._ends.append(clock())
        else:
            self.work.get_future().add_done_callback(lambda _: self._ends.append(clock()))

    @property
    def end_s(self) -> float | None:
        return self._ends[0] if self._ends else None


ALONE = TensorAxis(0, 1)


def join(rank: int, size: int, *, meeting: str, timeout_s: float, device: torch.device = CPU) -> TensorAxis:
    """Meet the other ranks at `meeting` (`file://PATH` or `tcp://HOST:PORT`, the same for all). Tensors on a CPU go by
    gloo; those on `device`, where it is a GPU, which is then this process's current one, by NCCL.

    Raises RankError where they do not all come within the timeout, which holds for every later exchange too.
    """
    backend, on_gpu = "gloo", device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, OSError) as error:
        raise rank_lost(rank, size, error) from error
    return TensorAxis(rank, size, dist.group.WORLD)


def leave() -> None:
    """End what `join` began; safe where nothing has begun."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_lost(rank: int, size: int, error: BaseException) -> RankError:
    """What an exchange that has failed comes to."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RankError(
        f"another of the {size} ranks has died or does not answer ({said[:200]})",
        where=f"rank {rank}",
        hint="see that rank's own output for why; then start the run again, which goes on from its checkpoints",
    )


@contextmanager
def answered(rank: int, size: int) -> Iterator[None]:
    """Within, an exchange that fails is a RankError."""
    try:
        yield
    except RuntimeError as error:
        raise rank_lost(rank, size, error) from error


class _Entered(torch.autograd.Function):
    """Megatron-LM's f: the identity, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        axis: TensorAxis = ctx.axis  # type: ignore[attr-defined]
        own = grads[0].clone(memory_format=torch.contiguous_format)  # others may hold this gradient too
        return axis.sum_(own), None


class _Summed(torch.autograd.Function):
    """Megatron-LM's g: the sum over the ranks, whose gradient is that of each summand."""

    @staticmethod
    def forward(ctx: object, x: Tensor, axis: TensorAxis) -> Tensor:
        return axis.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def entered(x: Tensor, axis: TensorAxis) -> Tensor:
    """Rows that all ranks have, where each goes on with a part of its own: their gradients are summed there."""
    out: Tensor = _Entered.apply(x, axis)  # type: ignore[no-untyped-call]
    return out


def summed(x: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of what the ranks have, on all of them."""
    out: Tensor = _Summed.apply(x, axis)  # type: ignore[no-untyped-call]
    return out
