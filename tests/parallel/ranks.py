"""Ranks as processes: a group that starts once and runs many functions, and says what each rank made of them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from muxtune.parallel.mesh import TensorAxis, join, leave


@dataclass(frozen=True, slots=True)
class Raised:
    """What a rank's function raised."""

    kind: str
    message: str
    traceback: str


class RankGroup:
    """`size` processes of one thread each, which have met. `timeout_s` is that of their exchanges."""

    def __init__(self, size: int, *, timeout_s: float = 60) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{Path(self._folder.name) / 'meeting'}"
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, meeting, timeout_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(axis, *arguments)` answers on each rank. Fails where it raises on any."""
        self.tell(function, *arguments)
        return self.answers()

    def answers(self) -> list[Any]:
        """What all of them answer to what they were told."""
        answers = [self.answer(rank, within_s=240) for rank in range(len(self._pipes))]
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, Raised), f"rank {rank}: {answer.traceback}"
        return answers

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it run on all ranks."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def answer(self, rank: int, *, within_s: float) -> Any:
        """What the rank answers to what it was told; a `Raised` where that raised."""
        assert self._pipes[rank].poll(within_s), f"rank {rank} said nothing for {within_s} s"
        return self._pipes[rank].recv()

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, meeting: str, timeout_s: float, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    axis = join(rank, size, meeting=meeting, timeout_s=timeout_s)
    try:
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(_tried(function, axis, arguments))
    finally:
        leave()


def _tried(function: Callable[..., Any], axis: TensorAxis, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(axis, *arguments)
    except Exception as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())


def sum_for(axis: TensorAxis, seconds: float) -> int:
    """Exchange sums for so long; how many."""
    import torch

    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        axis.sum_(torch.ones(8))
        count += 1
    return count
