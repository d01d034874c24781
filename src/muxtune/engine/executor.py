"""Runs schedules: the one primitive of the engine.

`execute` does exactly what a `RoundSchedule` says, action by action, and answers with a `RoundRecord` in the same
vocabulary. A train micro-batch is one forward and one backward pass of the backbone over the rows of all its items; a
forward-only one (eval, reference) keeps no graph; a decode one feeds new tokens to the sequences of a `DecodeSource`.

The boundary: it knows tasks by name, and sequences by (source, index). It owns no order, no policy and no clock but the
one it times actions with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.decode import DecodeSource, run_decode
from muxtune.engine.packing import ItemRows, PackedBatch, pack
from muxtune.engine.task import Task
from muxtune.errors import StateError
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext
from muxtune.models.backbone import Backbone
from muxtune.models.loss import TokenLosses, token_losses, token_losses_plain
from muxtune.peft.base import Dispatch
from muxtune.peft.dropout import RowKeys, row_keys
from muxtune.peft.grouped import Rule, measured
from muxtune.peft.multiplex import hooks
from muxtune.plan.legal import require_legal
from muxtune.plan.types import ActionRecord, ItemOutcome, MicroBatch, OptimStep, RoundRecord, RoundSchedule, WorkItem

Source = Sequence[TokenSequence] | DecodeSource


class Executor:
    """Args: `tasks` and `sources` are read at each execute; `plain` selects the twin of every fast path, `grouping`
    says where adapters of a kind run as one."""

    def __init__(
        self,
        backbone: Backbone,
        tasks: Mapping[str, Task],
        sources: Mapping[str, Source],
        *,
        plain: bool = False,
        grouping: Rule = measured,
    ) -> None:
        self._backbone = backbone
        self._tasks = tasks
        self._sources = sources
        self._plain = plain
        self._grouping = grouping

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        """Run every action in order.

        Raises StateError, before anything has run, for an illegal schedule or one that names what is not there. Where
        a pass raises, the tasks it trained lose their step in progress, gradient and all: a step counts once or never.
        """
        self._check(schedule)
        try:
            return self._run(schedule)
        except BaseException:
            for task in {item.task for action in _passes(schedule) for item in action.items if item.kind == "train"}:
                if task is not None:
                    self._tasks[task].drop_pending()
            raise

    def _run(self, schedule: RoundSchedule) -> RoundRecord:
        began = time.perf_counter()
        records: list[ActionRecord] = []
        for index, action in enumerate(schedule.actions):
            start_s = time.perf_counter() - began
            if isinstance(action, OptimStep):
                step = self._tasks[action.task].optimizer_step()
                record = ActionRecord(index, start_s, time.perf_counter() - began, step=step)
            else:
                items, rows = self._micro_batch(action)
                record = ActionRecord(index, start_s, time.perf_counter() - began, rows, items)
            records.append(record)
        return RoundRecord(schedule, tuple(records), time.perf_counter() - began)

    def _check(self, schedule: RoundSchedule) -> None:
        steps = {action.task for action in schedule.actions if isinstance(action, OptimStep)}
        items = [item for action in _passes(schedule) for item in action.items]
        for task in steps | {item.task for item in items if item.task is not None}:
            if task not in self._tasks:
                raise StateError("no such task is attached", where=task)
        require_legal(schedule, [name for name, task in self._tasks.items() if task.has_pending])
        for item in items:
            self._check_sequences(item)

    def _check_sequences(self, item: WorkItem) -> None:
        source = self._sources.get(item.source)
        if source is None or isinstance(source, DecodeSource) != (item.kind == "decode"):
            raise StateError(f"no such source of sequences to {item.kind}", where=item.source)
        for ref in item.sequences:
            held = _tokens_of(source, ref.index)
            if held != ref.length:
                raise StateError(f"sequence {ref.index} has {held} tokens, not {ref.length}", where=item.source)

    def _micro_batch(self, batch: MicroBatch) -> tuple[tuple[ItemOutcome, ...], int]:
        if all(item.kind == "decode" for item in batch.items):
            return (), run_decode(self._backbone, batch, self._tasks, self._sources, plain=self._plain)
        sources = {
            item.source: source
            for item in batch.items
            if not isinstance(source := self._sources[item.source], DecodeSource)
        }
        adapters = {item.task: self._tasks[item.task].adapter for item in batch.items if item.task is not None}
        packed = pack(batch, sources, adapters, self._backbone.device, self._precision)
        losses = self._train(packed) if batch.trains else self._forward(packed)
        outcomes = tuple(_outcomes(packed, losses))
        for outcome in outcomes:
            if outcome.kind == "train" and outcome.task is not None:
                self._tasks[outcome.task].count(outcome)
        return outcomes, len(packed.rows.ids_T)

    @property
    def _precision(self) -> torch.dtype:
        return torch.promote_types(self._backbone.dtype, torch.float32)

    def _train(self, packed: PackedBatch) -> TokenLosses:
        with torch.enable_grad():
            rows_ND = self._predicting_rows(packed)
        losses = self._losses(rows_ND.detach(), packed)
        assert losses.grad_ND is not None
        torch.autograd.backward([rows_ND], [losses.grad_ND])
        return losses

    @torch.no_grad()
    def _forward(self, packed: PackedBatch) -> TokenLosses:
        return self._losses(self._predicting_rows(packed), packed)

    def _predicting_rows(self, packed: PackedBatch) -> Tensor:
        dispatches = [
            Dispatch(rows.start, rows.stop, self._tasks[rows.item.task].adapter, self._keys(rows))
            for rows in packed.items
            if rows.item.task is not None
        ]
        rows = packed.rows
        hooked = hooks(dispatches, plain=self._plain, grouping=self._grouping)
        current = Pass(AttentionContext(rows.segments), hooked, rows.given)
        return self._backbone.hidden(rows.ids_T, rows.positions_T, current)[packed.predict_N]

    def _losses(self, rows_ND: Tensor, packed: PackedBatch) -> TokenLosses:
        losses_of = token_losses_plain if self._plain else token_losses
        return losses_of(self._backbone.head, rows_ND, packed.target_N, packed.weight_N)

    def _keys(self, rows: ItemRows) -> RowKeys | None:
        assert rows.item.task is not None
        task = self._tasks[rows.item.task]
        if rows.item.kind != "train" or not task.adapter.stochastic:
            return None
        return row_keys(task.job.seed, task.step, rows.example_t, rows.position_t, self._backbone.device)


def _passes(schedule: RoundSchedule) -> list[MicroBatch]:
    return [action for action in schedule.actions if isinstance(action, MicroBatch)]


def _tokens_of(source: Source, index: int) -> int:
    """What a reference to this sequence must say; 0 where there is none."""
    if isinstance(source, DecodeSource):
        return source.waiting(index)
    return len(source[index]) if 0 <= index < len(source) else 0


def _outcomes(packed: PackedBatch, losses: TokenLosses) -> list[ItemOutcome]:
    """Per item, summed in float64 in the order of its tokens, so that no co-runner can change a bit."""
    logprob_N, correct_N = losses.logprob_N.double().cpu().numpy(), losses.correct_N.cpu().numpy()
    outcomes = []
    for rows in packed.items:
        own = slice(rows.first, rows.last)
        logprobs = tuple(logprob_N[own].tolist()) if rows.item.kind == "reference" else None
        outcomes.append(
            ItemOutcome(
                rows.item.task,
                rows.item.kind,
                float(-logprob_N[own].sum()),
                rows.last - rows.first,
                int(correct_N[own].sum()),
                rows.item.tokens,
                logprobs,
            )
        )
    return outcomes
