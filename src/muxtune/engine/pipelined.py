"""Runs schedules on one stage of a pipeline: the executor of a backbone whose layers several ranks hold one after
another.

Every stage is given the same schedule and runs its own turns of it (`muxtune.plan.turns`). What goes to and fro:

    forth    rows [T, D] of a pass; the norm of a whole gradient, for a step
    back     log-probabilities of a pass's targets, and whether each was the argmax, 2 N numbers; the gradient of rows
             [T, D], to a stage that has, or has before it, anything that trains in the pass; of a gradient that is
             whole, the sum of squares so far

All stages lay out the same rows and know every shape beforehand, so receives are posted before their turn: forth two
ahead, back as soon as a pass has gone on. The last stage has head and losses. What these come to all stages find out
from the same numbers in the same way - losses, counts, dpo's comparisons -, so that a task is the same on each of them
and steps, or is dropped, on all. A step needs the norm over all stages: squares are added on the way back and the whole
goes forth, from stage to stage with the work.

Overlap changes no bit: a task's passes go forward, and come back, in the schedule's order either way.

The boundary: what a pass is made of, and what comes of its losses, is `muxtune.engine.executor`'s business; here is
where it goes. A pass that raises on one stage ends all of them: the others wait for rows that never come.

Legend: T packed rows, D model, N trained positions, U those of them with rows of their own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from muxtune.engine.executor import Executor, Source, gather, gathered_gradient
from muxtune.engine.flights import BEHIND, Flight, Incoming, Run, Shape, StageRecord, told
from muxtune.engine.layout import ROW_MULTIPLE
from muxtune.engine.references import References
from muxtune.engine.task import Task
from muxtune.errors import RankError, StateError
from muxtune.models.loss import TokenLosses
from muxtune.parallel.chain import WholeLayers
from muxtune.parallel.mesh import Exchange
from muxtune.parallel.stage import ShardedStage, StagedBackbone
from muxtune.parallel.staged import StagedAdapter
from muxtune.parallel.steps import Steps
from muxtune.peft.grouped import Rule, measured
from muxtune.plan.turns import Turn, plain_turns, stage_turns
from muxtune.plan.types import ActionRecord, MicroBatch, OptimStep, RoundSchedule, tasks_of

_NORM = ((1,), torch.float64)


class PipelineExecutor(Executor):
    """See `Executor`. `staged` are the tasks' adapters, read at each execute; without `overlap` a pass is back before
    the next one begins."""

    _takes_turns = False  # whole layers run one after another; it is stages that are busy at once

    def __init__(
        self,
        backbone: StagedBackbone | ShardedStage,
        tasks: Mapping[str, Task],
        sources: Mapping[str, Source],
        references: References,
        *,
        staged: Mapping[str, StagedAdapter],
        plain: bool = False,
        grouping: Rule = measured,
        overlap: bool = True,
    ) -> None:
        super().__init__(backbone, tasks, sources, references, plain=plain, grouping=grouping)
        self.stage = backbone.stage
        self._stage_record: StageRecord | None = None
        self._staged = staged
        self._overlap = overlap
        self._kept: dict[object, Flight] = {}

    @contextmanager
    def recording(self, clock: Callable[[], float]) -> Iterator[StageRecord]:
        """Note what this stage does when, while the block lasts."""
        self._stage_record = StageRecord(clock, self.stage.axis.stage)
        try:
            yield self._stage_record
        finally:
            self._stage_record = None

    def _check(self, schedule: RoundSchedule) -> None:
        super()._check(schedule)
        for action in schedule.actions:
            if isinstance(action, MicroBatch) and any(item.kind == "decode" for item in action.items):
                raise StateError(
                    "a model that is split into stages cannot decode yet",
                    where=action.items[0].source,
                    hint="sample from the saved adapter on one rank: muxtune sample",
                )

    def _ran(self, schedule: RoundSchedule, began: float) -> Iterator[ActionRecord]:
        axis = self.stage.axis
        turns = stage_turns(schedule, axis.stages, axis.stage) if self._overlap else plain_turns(schedule)
        closes = {turn.index: turn.closes for turn in turns if turn.direction == "backward"}
        shapes = self._shapes_in(schedule, turns)
        incoming = Incoming(axis.rows_in, shapes, self._backbone.device) if axis.rows_in is not None else None
        run = Run(schedule, began, incoming, closes)
        try:
            for turn in turns:
                self._resume(run, turn, self._piece(run, turn))
            for message in (*run.sent_back, *run.sent_norms):
                message.wait()
        except RankError:
            raise
        except Exception as error:
            raise RankError(
                f"a pass has raised on stage {axis.stage} ({type(error).__name__}: {error}), which ends all stages",
                where=f"rank {self._mesh_rank}",
                hint="start the run again, which goes on from its checkpoints",
            ) from error
        finally:
            self._kept.clear()
        yield from (run.records[index] for index in range(len(schedule.actions)))

    @property
    def _mesh_rank(self) -> int:
        backbone = self._backbone
        assert isinstance(backbone, StagedBackbone | ShardedStage)
        return backbone.mesh.world.rank

    def _resume(self, run: Run, turn: Turn, steps: Steps[None]) -> None:
        """Run a piece, waiting where it waits; note when it computed."""
        record = self._stage_record
        while True:
            start_s = record.clock() if record is not None else 0.0
            waiting = next(steps, None)
            if record is not None:
                record.computed(*told(run.schedule.actions, turn), start_s)
            if waiting is None:
                return
            waiting.wait()

    def _piece(self, run: Run, turn: Turn) -> Steps[None]:
        if turn.direction == "forward":
            return self._forth(run, turn.index)
        return self._back(run, turn.index) if turn.direction == "backward" else self._step(run, turn)

    def _shapes_in(self, schedule: RoundSchedule, turns: Sequence[Turn]) -> Iterator[Shape]:
        """Of what comes from the stage before, in order."""
        width = int(self._backbone.config.hidden_size)
        for turn in turns:
            action = schedule.actions[turn.index]
            if isinstance(action, OptimStep):
                yield _NORM
            elif turn.direction == "forward" and not action.resumes:
                yield (self._rows_of(action), width), self._backbone.dtype

    def _rows_of(self, batch: MicroBatch) -> int:
        """How many rows it will be laid out as."""
        rows = 0
        for item in batch.items:
            virtual = self._tasks[item.task].adapter.virtual_rows if item.task is not None else 0
            rows += sum(max(ref.rows(virtual), batch.width) for ref in item.sequences)
        return rows + -rows % ROW_MULTIPLE

    def _forth(self, run: Run, index: int) -> Steps[None]:
        batch = run.batch(index)
        if batch.resumes:
            kept = self._kept.pop(batch.pieces)
            flight = replace(
                kept,
                batch=batch,
                packed=self._packed(batch),
                start_s=run.now_s,
                losses=None,
                sent=None,
                awaited=deque(),
            )
        else:
            flight = yield from self._through(run, batch)
        if self.stage.last:
            self._score(flight)
        else:
            flight.awaited = self._expected(flight, run.closes[index])
        if batch.keep and not batch.trains:
            self._kept[batch.pieces] = flight
        run.flights[index] = flight

    def _through(self, run: Run, batch: MicroBatch) -> Steps[Flight]:
        """Through the layers, and on to the next stage."""
        start_s, packed = run.now_s, self._packed(batch)
        current, learns = self._pass(packed), batch.trains or batch.keep
        with torch.set_grad_enabled(learns):
            prelude = self._backbone.begin(packed.rows.ids_T, packed.rows.positions_T, current)
        first_TD = prelude.x_TD
        if run.incoming is not None:
            message = run.incoming.take()
            yield message
            assert message.value.shape == first_TD.shape, "stages have laid out a pass in different ways"
            first_TD = message.value.requires_grad_(learns and self._lowest(batch) < self.stage.axis.stage)
        recompute = batch.recompute and batch.trains
        chain = WholeLayers(self._backbone, prelude, current, self.stage.layers, learns=learns, recompute=recompute)
        last_TD = yield from chain.forward(first_TD)
        out = self.stage.axis.rows_out
        sent = out.send(last_TD.detach()) if out is not None else None
        return Flight(batch, packed, current, chain, first_TD, last_TD, start_s, sent=sent)

    def _lowest(self, batch: MicroBatch) -> int:
        """The first stage that has anything of the pass's tasks; behind the last where there is none."""
        return min((self._staged[task].lowest for task in tasks_of(batch) if task is not None), default=self._stages)

    @property
    def _stages(self) -> int:
        return self.stage.axis.stages

    def _score(self, flight: Flight) -> None:
        """What follows the last layer: losses and, where the pass trains, the gradient that its way back has to begin
        with."""
        batch, packed = flight.batch, flight.packed
        with torch.set_grad_enabled(batch.trains or batch.keep):
            if flight.hidden_TD is None:
                flight.hidden_TD = self._backbone.finish(flight.last_TD, flight.current)
        if not batch.trains:
            with torch.no_grad():
                flight.losses = self._losses(flight.hidden_TD[packed.predict_N], packed)
            return
        with torch.enable_grad():
            rows_UD, place_N = gather(flight.hidden_TD, packed)
        rows_ND = rows_UD.detach() if place_N is None else rows_UD.detach()[place_N]
        flight.losses = self._losses(rows_ND, self._weighed(rows_ND, packed))
        flight.hidden_TD = None
        if rows_UD.requires_grad:  # else nothing below the head is trained
            flight.ends = rows_UD, gathered_gradient(flight.losses, rows_UD, place_N)

    def _expected(self, flight: Flight, closes: Sequence[int]) -> deque[Exchange]:
        """Post the receives of all that the next stage will send back of a pass."""
        link, device = self.stage.axis.back_in, self._backbone.device
        assert link is not None
        shapes: list[Shape] = []
        if len(flight.packed.predict_N):
            shapes.append(((2, len(flight.packed.predict_N)), self._precision))
        if flight.batch.trains and self._lowest(flight.batch) <= self.stage.axis.stage:
            shapes.append((tuple(flight.last_TD.shape), flight.last_TD.dtype))
        shapes += [_NORM for _ in closes]
        return deque(link.receive(*shape, device) for shape in shapes)

    def _back(self, run: Run, index: int) -> Steps[None]:
        flight = run.flights.pop(index)
        batch = flight.batch
        if not self.stage.last:
            flight.losses = yield from self._told_losses(flight)
        assert flight.losses is not None
        self._tell_losses(run, flight.losses)
        if batch.trains:
            yield from self._pull(run, flight)
        if flight.sent is not None:  # it has arrived, or nothing would have come back
            flight.sent.wait()
        items = self._finished(batch, flight.packed, flight.losses)
        rows = len(flight.packed.rows.ids_T) if not batch.resumes else 0
        run.records[index] = ActionRecord(index, flight.start_s, run.now_s, rows, items)
        for step in run.closes[index]:
            yield from self._close(run, step, flight.awaited)

    def _told_losses(self, flight: Flight) -> Steps[TokenLosses]:
        nothing = torch.zeros(2, 0, dtype=self._precision, device=self._backbone.device)
        if not len(flight.packed.predict_N):
            return TokenLosses(nothing[0], nothing[1] > 0, None)
        message = flight.awaited.popleft()
        yield message
        return TokenLosses(message.value[0], message.value[1] > 0, None)

    def _tell_losses(self, run: Run, losses: TokenLosses) -> None:
        if len(losses.logprob_N):
            self._send_back(run, torch.stack([losses.logprob_N, losses.correct_N.to(losses.logprob_N.dtype)]))

    def _pull(self, run: Run, flight: Flight) -> Steps[None]:
        """The way back through the layers."""
        lowest, stage = self._lowest(flight.batch), self.stage
        grad_TD: Tensor | None = None
        if stage.last:
            if flight.ends is not None:
                (rows_UD, grad_UD), flight.ends = flight.ends, None
                torch.autograd.backward([rows_UD], [grad_UD])
                grad_TD = flight.last_TD.grad
        elif lowest <= stage.axis.stage:
            message = flight.awaited.popleft()
            yield message
            grad_TD = message.value
        if grad_TD is not None:
            grad_TD = yield from flight.chain.backward(grad_TD)
        if lowest < stage.axis.stage:
            self._send_back(run, grad_TD if grad_TD is not None else torch.zeros_like(flight.first_TD))
        elif stage.first and grad_TD is not None and flight.first_TD.requires_grad:
            torch.autograd.backward([flight.first_TD], [grad_TD])

    def _close(self, run: Run, step: int, awaited: deque[Exchange]) -> Steps[None]:
        """Add this stage's part to the squares of a gradient that is whole now, and send them on."""
        action = run.schedule.actions[step]
        assert isinstance(action, OptimStep)
        total = self._staged[action.task].norm.square()
        if not self.stage.last:
            message = awaited.popleft()
            yield message
            total += float(message.value)
        run.squares[step] = total
        self._send_back(run, self._norm_told(total))

    def _norm_told(self, total: float) -> Tensor:
        """Squares of a gradient, as `_NORM` has them, where they can be sent from."""
        return torch.tensor([total], dtype=_NORM[1], device=self._backbone.device)

    def _step(self, run: Run, turn: Turn) -> Steps[None]:
        action, axis = run.schedule.actions[turn.index], self.stage.axis
        assert isinstance(action, OptimStep)
        start_s = run.now_s
        if turn.closes:
            link, device = axis.back_in, self._backbone.device
            awaited = deque([link.receive(*_NORM, device)] if link is not None else [])
            yield from self._close(run, turn.index, awaited)
        total = run.squares.pop(turn.index)
        if run.incoming is not None:
            message = run.incoming.take()
            yield message
            total = float(message.value)
        if axis.rows_out is not None:
            run.sent_norms.append(axis.rows_out.send(self._norm_told(total)))
        self._staged[action.task].norm.tell(math.sqrt(total))
        step = self._tasks[action.task].optimizer_step(action.lr)
        run.records[turn.index] = ActionRecord(turn.index, start_s, run.now_s, step=step)

    def _send_back(self, run: Run, value: Tensor) -> None:
        """To the stage before, which has posted the receive long ago: older ones have arrived."""
        link = self.stage.axis.back_out
        if link is None:
            return
        run.sent_back.append(link.send(value.to(self._backbone.device)))
        if len(run.sent_back) > BEHIND:
            run.sent_back.popleft().wait()
