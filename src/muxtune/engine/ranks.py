"""Rank 0's side of a backbone that many ranks hold: it announces what its engine does, and asks for what is to be kept.

    meet       every rank says what it is: versions, the run; who differs is named and the run ends
    load       each loads its part of the base model, which must have the same weights everywhere
    ...        the engine's primitives, in its own order (`muxtune.engine.followers`)
    end        the others end

One order at a time: told, done by all at once, agreed on (`muxtune.engine.agreement`). Once a rank is lost nothing is
announced any more, and everything that would be raises the same error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from muxtune.engine.agreement import agree
from muxtune.engine.decode import DecodeSource
from muxtune.engine.followers import Announced, Outcome, Source
from muxtune.engine.load import DTypeName, HeldBackbone, choose_dtype, load_held
from muxtune.engine.orders import new_tokens, reference_values, tensors_of
from muxtune.engine.references import References
from muxtune.engine.task import Sequences, Task
from muxtune.engine.whole import HeldAdapter, ShardedParts, ShardedWhole, Tensors, Whole, parts_answer
from muxtune.errors import RankError
from muxtune.models.backbone import Backbone
from muxtune.models.sources import ModelFolder
from muxtune.parallel.channel import Channel, Message, Pulse
from muxtune.parallel.layout import RankLayout
from muxtune.parallel.mesh import TensorAxis
from muxtune.plan.trace import schedule_line
from muxtune.plan.types import RoundSchedule
from muxtune.spec.job import JobSpec

_PULSES = 4  # within a timeout


class Ranks:
    """Args:
    channel, axis: how all ranks speak, and all of them as a group.
    device: of this rank.
    here: how many of the ranks share this machine's memory.
    timeout_s: how long a rank may be silent; a sign of life is sent more often while nothing else is.
    diagnose: says more of a lost rank, where somebody knows (who has started the ranks, say).
    """

    def __init__(
        self,
        channel: Channel,
        axis: TensorAxis,
        layout: RankLayout,
        *,
        device: torch.device,
        here: int,
        timeout_s: float,
        diagnose: Callable[[RankError], RankError] = lambda error: error,
    ) -> None:
        self.layout = layout
        self.here = here
        self.axis = axis
        self.device = device
        self._channel = channel
        self._diagnose = diagnose
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._pulse = Pulse(channel, self._lock, timeout_s / _PULSES)
        self._backbone: HeldBackbone | None = None
        self._sharded: Mapping[str, HeldAdapter] = {}
        self._lost: RankError | None = None

    @contextmanager
    def leading(self) -> Iterator[None]:
        """While the block lasts the others follow; then they end."""
        with self._pulse:
            try:
                yield
            finally:
                self._end()

    def load(
        self,
        base: ModelFolder,
        *,
        dtype: DTypeName,
        layers: int | None,
        threads: int | None,
        plain: bool,
    ) -> HeldBackbone:
        """This rank's part, while each of the others loads its own. Raises as `load_held`."""
        precision = choose_dtype(dtype, self.device)
        told: Message = {
            "do": "load",
            "base": base.name,
            "weights": base.weights_sha256,
            "dtype": str(precision).removeprefix("torch."),
            "layers": layers,
            "threads": threads,
            "plain": plain,
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "timeout_s": self._timeout_s,
        }
        with self._together(told):
            self._backbone = load_held(
                base,
                self.axis,
                self.layout,
                dtype=precision,
                device=self.device,
                layers=layers,
                timeout_s=self._timeout_s,
            )
        return self._backbone

    @property
    def view(self) -> Backbone:
        """The whole model, without memory."""
        assert self._backbone is not None, "nothing is loaded"
        return self._backbone.whole

    def holding(self, sharded: Mapping[str, HeldAdapter]) -> None:
        """Where the engine keeps its adapters' parts, by task."""
        self._sharded = sharded

    def attaching(self, job: JobSpec, data: Sequences, chunk_tokens: int) -> Announced:
        told = {"do": "attach", "job": job.model_dump(mode="json"), "chunk_tokens": chunk_tokens}
        return self._together(told, tensors_of(data.train, "train") | tensors_of(data.validation, "validation"))

    def detaching(self, name: str) -> Announced:
        return self._together({"do": "detach", "task": name})

    def trimming(self) -> Announced:
        return self._together({"do": "trim"})

    def lending(self, sources: Mapping[str, Source]) -> Announced:
        """Token sequences travel; a source to decode begins empty everywhere."""
        tensors: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}
        for name, source in sources.items():
            kinds[name] = "decode" if isinstance(source, DecodeSource) else "tokens"
            if not isinstance(source, DecodeSource):
                tensors |= tensors_of(source, name)
        return self._together({"do": "lend", "sources": kinds}, tensors)

    def returning(self, names: Sequence[str]) -> Announced:
        return self._together({"do": "return", "sources": list(names)})

    def executing(self, schedule: RoundSchedule, sources: Mapping[str, Source], known: References) -> Announced:
        """The schedule, and what only rank 0 knows of it."""
        return self._together(
            {
                "do": "execute",
                "schedule": schedule_line(schedule),
                "references": reference_values(schedule, known),
                "tokens": new_tokens(schedule, sources),
            }
        )

    def whole(self, task: Task) -> Whole:
        """What a checkpoint of the task is made of, put together by all ranks."""
        assert self._backbone is not None
        parts = ShardedParts(self._sharded[task.name], task.optimizer)

        def asked(what: str) -> dict[str, Tensor]:
            with self._together({"do": "whole", "task": task.name, "what": what}):
                return parts_answer(parts, what)

        def told(state: Tensors, moments: Tensors, step: int) -> None:
            order = {"do": "give", "task": task.name, "step": step}
            held = {f"state/{name}": value for name, value in state.items()}
            held |= {f"moments/{name}": value for name, value in moments.items()}
            with self._together(order, held):
                parts.load(state, moments, step)

        dtype = self._backbone.dtype
        return ShardedWhole(task.job, self.view, dtype, asked=asked, told=told, steps=lambda: task.step)

    @contextmanager
    def _together(self, order: Message, tensors: Mapping[str, Tensor] | None = None) -> Iterator[Outcome]:
        """Tell the others, let this rank do the same in the block, and agree on what it came to."""
        if self._lost is not None:
            raise self._lost
        outcome = Outcome()
        with self._lock:
            try:
                self._channel.tell(order, tensors)
                try:
                    yield outcome
                except RankError:
                    raise
                except Exception as error:
                    agree(self._channel, outcome, error)
                    raise
                agree(self._channel, outcome, None)
            except RankError as error:
                self._lost = self._diagnose(error)
                raise self._lost from error
            except BaseException as error:
                if not isinstance(error, Exception):  # interrupted: the others are in the middle of it
                    self._lost = RankError("was stopped in the middle of a step", rank=0)
                raise

    def _end(self) -> None:
        """Nobody is told anything where a rank is lost, or something that was begun has not come to its end."""
        if self._lost is None:
            with self._lock, suppress(RankError):
                self._channel.tell({"do": "end"})
