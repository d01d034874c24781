"""Every rank but the first: an engine that does what rank 0 announces, at the same time, and decides nothing.

    hear an order -> do it -> agree with all ranks on what it came to -> hear the next

It holds its part of the backbone and of each adapter, the tasks' tokens (told once, when they are attached) and their
optimizers; it reads no data, knows no plan and writes no folder. The counterpart is `muxtune.engine.ranks`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from muxtune.engine.agreement import agree
from muxtune.engine.decode import DecodeSource
from muxtune.engine.engine import Engine
from muxtune.engine.followers import Outcome
from muxtune.engine.load import load_held
from muxtune.engine.orders import ToldReferences, sequences_from, take_tokens
from muxtune.engine.task import Sequences
from muxtune.engine.whole import ShardedParts, parts_answer
from muxtune.errors import ModelError, RankError
from muxtune.models.sources import resolve
from muxtune.parallel.channel import Channel, Message
from muxtune.parallel.layout import RankLayout
from muxtune.parallel.mesh import TensorAxis
from muxtune.plan.trace import schedule_from
from muxtune.spec.job import JobSpec

_Tensors = Mapping[str, Tensor]


class Follower:
    """Args: `device` is this rank's; `cache_dir` is where base models are converted to and found."""

    def __init__(self, channel: Channel, axis: TensorAxis, *, device: torch.device, cache_dir: Path) -> None:
        self._channel = channel
        self._axis = axis
        self._device = device
        self._cache = cache_dir
        self._references = ToldReferences()
        self._engine: Engine | None = None
        self._orders: Mapping[str, Callable[[Message, _Tensors, Outcome], None]] = {
            "load": self._load,
            "attach": self._attach,
            "detach": self._detach,
            "trim": self._trim,
            "lend": self._lend,
            "return": self._return,
            "execute": self._execute,
            "whole": self._whole,
            "give": self._give,
        }

    def run(self) -> None:
        """Follow until rank 0 ends the run. Raises RankError where a rank is lost, or fails alone: this one as well."""
        while True:
            order, tensors = self._channel.hear()
            if order["do"] == "end":
                return
            outcome = Outcome()
            raised: Exception | None = None
            try:
                self._orders[order["do"]](order, tensors, outcome)
            except RankError:
                raise
            except Exception as error:
                raised = error
            agree(self._channel, outcome, raised)
            if raised is not None:
                raised = None
                gc.collect()  # it held the whole pass

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "an order before the base model"
        return self._engine

    def _load(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        if order["threads"] is not None:
            torch.set_num_threads(order["threads"])
        base = resolve(order["base"], cache_dir=self._cache)
        if base.weights_sha256 != order["weights"]:
            raise ModelError(
                f"has other weights here, sha256 {base.weights_sha256[:12]}..., than at rank 0, "
                f"{order['weights'][:12]}...",
                where=order["base"],
                hint="give every machine the same model",
            )
        layout = RankLayout(order["tp"], order["pp"])
        backbone = load_held(
            base,
            self._axis,
            layout,
            dtype=getattr(torch, order["dtype"]),
            device=self._device,
            layers=order["layers"],
            timeout_s=order["timeout_s"],
        )
        self._engine = Engine(backbone, plain=order["plain"], references=self._references)

    def _attach(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        data = Sequences(sequences_from(tensors, "train"), sequences_from(tensors, "validation"))
        self.engine.attach(JobSpec.model_validate(order["job"]), data, chunk_tokens=order["chunk_tokens"])

    def _detach(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        self.engine.detach(order["task"])

    def _trim(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        self.engine.trim()

    def _lend(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        for name, kind in order["sources"].items():
            self.engine.sources[name] = DecodeSource() if kind == "decode" else sequences_from(tensors, name)

    def _return(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        for name in order["sources"]:
            del self.engine.sources[name]

    def _execute(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        self._references.take(order["references"])
        take_tokens(order["tokens"], self.engine.sources)
        outcome.record = self.engine.execute(schedule_from(order["schedule"]))

    def _whole(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        parts_answer(self._parts(order["task"]), order["what"])

    def _give(self, order: Message, tensors: _Tensors, outcome: Outcome) -> None:
        state = _under(tensors, "state/")
        self._parts(order["task"]).load(state, _under(tensors, "moments/"), order["step"])
        self.engine.tasks[order["task"]].step = order["step"]

    def _parts(self, name: str) -> ShardedParts:
        return ShardedParts(self.engine.sharded[name], self.engine.tasks[name].optimizer)


def _under(tensors: _Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
