"""What rank 0 tells the others, and what all of them tell each other: JSON and raw tensors, never a pickle.

    tell / hear    rank 0 to all: one message of JSON, and tensors with it
    exchange       all to all: a short answer of each, for what ranks have to agree on

A rank that waits to be told something waits as long as rank 0 lives: while nobody is told anything, a thread of rank 0
sends a sign of life (`Pulse`), so that a rank 0 that is stopped is found out within the group's timeout, too. Whatever
a dead or silent rank breaks becomes a `RankError`.

Messages come from a rank of the same program, which has been asked for its version before anything else is believed;
they are decoded as data and nothing of them is executed.

Cost: two small broadcasts a message and one for each tensor; an exchange is one all-gather of 2 KB.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from muxtune.errors import RankError
from muxtune.parallel.mesh import TensorAxis, answered

Message = dict[str, Any]  # what JSON can say
_ANSWER_BYTES = 2048
_PULSE: Message = {"do": "pulse"}


class Channel:
    """This rank's end. Made by all ranks together (`open_channel`); used by one thread at a time."""

    def __init__(self, rank: int, size: int, group: ProcessGroup) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def tell(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """To all others, which `hear` it. Only rank 0 does."""
        held = {name: one.detach().cpu().contiguous() for name, one in (tensors or {}).items()}
        said = [[name, str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in held.items()]
        text = json.dumps([message, said], separators=(",", ":")).encode()
        self._broadcast(torch.tensor([len(text)]))
        self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for one in held.values():
            if one.numel():
                self._broadcast(_bytes(one))

    def hear(self) -> tuple[Message, dict[str, Tensor]]:
        """What rank 0 tells next; signs of life are passed over."""
        while True:
            length = self._broadcast(torch.zeros(1, dtype=torch.int64))
            text = self._broadcast(torch.zeros(int(length), dtype=torch.uint8))
            message, said = json.loads(text.numpy().tobytes())
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in said}
            for one in tensors.values():
                if one.numel():
                    self._broadcast(_bytes(one))
            if message != _PULSE:
                return message, tensors

    def exchange(self, answer: Message, *, within_s: float | None = None) -> list[Message]:
        """Every rank's answer, by rank. Raises RankError where they have not all come within `within_s`."""
        own, all_of_them = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8), self._answers()
        text = json.dumps(answer, separators=(",", ":")).encode()
        assert len(text) <= _ANSWER_BYTES, "an answer is short"
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with answered(self.rank, self.size):
            work = dist.all_gather(all_of_them, own, group=self._group, async_op=True)
            assert work is not None
            work.wait(*([timedelta(seconds=within_s)] if within_s is not None else []))
        return [json.loads(one.numpy().tobytes().rstrip(b"\0")) for one in all_of_them]

    def _answers(self) -> list[Tensor]:
        return [torch.zeros(_ANSWER_BYTES, dtype=torch.uint8) for _ in range(self.size)]

    def _broadcast(self, value: Tensor) -> Tensor:
        with answered(self.rank, self.size):
            dist.broadcast(value, src=0, group=self._group)
        return value


class Pulse:
    """A sign of life of rank 0 every `every_s`, whenever `lock` is free: whoever uses the channel holds it."""

    def __init__(self, channel: Channel, lock: threading.Lock, every_s: float) -> None:
        self._channel = channel
        self._lock = lock
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            if not self._lock.acquire(blocking=False):
                continue  # something else is being said
            try:
                if not self._over.is_set():
                    self._channel.tell(_PULSE)
            except RankError:
                return  # whoever speaks next finds the same
            finally:
                self._lock.release()


def open_channel(axis: TensorAxis, ranks: Sequence[int], *, timeout_s: float) -> Channel:
    """A channel beside the group of `axis`, among all ranks, which call this together."""
    try:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
    except RuntimeError as error:
        raise RankError(f"the ranks have not met ({error})", where=f"rank {axis.rank}") from error
    assert isinstance(group, ProcessGroup)
    return Channel(axis.rank, len(ranks), group)


def _bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
