"""Runs schedules: the one primitive of the engine.

`execute` does exactly what a `RoundSchedule` says, action by action, and answers with a `RoundRecord` in the same
vocabulary. A train micro-batch is one forward and one backward pass of the backbone over the rows of all its items; a
forward-only one (eval, reference, carry) keeps no graph, unless the schedule says so of carried pieces: these then
train from what was kept, without a forward pass; a decode one feeds new tokens to the sequences of a
`DecodeSource`. Pieces of cut sequences find the keys and values of what went before them in `CutSequences`. Where items
of dpo train, what their tokens weigh follows from their log-probabilities: the head runs once more on their rows alone,
before the sweep that makes all gradients; rows of sft have no part in that.

Where the backbone is split over ranks, neighbouring passes that train, each of other tasks, run as one slot: the layers
of one exchange while those of another compute (`muxtune.parallel.orchestrate`). One by one they come to the same bits.

The boundary: it knows tasks by name, and sequences by (source, index). It owns no order, no policy and no clock but the
one it times actions with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.cut import CutSequences
from muxtune.engine.decode import DecodeSource, run_decode
from muxtune.engine.failure import PassError, brief
from muxtune.engine.flights import StageRecord
from muxtune.engine.head import hooked_rows
from muxtune.engine.limits import Ids, require_known
from muxtune.engine.packing import ItemRows, PackedBatch, gathered, pack
from muxtune.engine.preference import Comparison, Ledger, compare, compare_part
from muxtune.engine.references import References
from muxtune.engine.task import Task
from muxtune.errors import RankError, StateError
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext
from muxtune.models.backbone import Backbone
from muxtune.models.denormals import flushing
from muxtune.models.loss import TokenLosses, token_losses, token_losses_plain
from muxtune.parallel.chain import LayerChain
from muxtune.parallel.orchestrate import Part, PassTimes, Record, order_of, run_slot, run_slot_plain
from muxtune.parallel.steps import Steps
from muxtune.parallel.subgraphs import Subgraphs
from muxtune.parallel.tensor import ShardedBackbone
from muxtune.peft.base import Dispatch
from muxtune.peft.dropout import RowKeys, row_keys
from muxtune.peft.grouped import Rule, measured
from muxtune.peft.multiplex import hooks
from muxtune.plan.interleave import slots
from muxtune.plan.legal import parts_pair, require_legal
from muxtune.plan.pipeline import StageAction
from muxtune.plan.types import (
    Action,
    ActionRecord,
    ItemOutcome,
    MicroBatch,
    OptimStep,
    RoundRecord,
    RoundSchedule,
    SequenceRef,
    WorkItem,
)

Source = Sequence[TokenSequence] | DecodeSource
TimesOf = Callable[[MicroBatch], PassTimes]


def by_rows(batch: MicroBatch) -> PassTimes:
    """What a pass takes where nothing has been measured: as much as it has rows, half of a layer's time on its link."""
    rows = float(batch.computed)
    return PassTimes(rows, rows, rows / 2, rows)


class Executor:
    """Args: `tasks`, `sources`, `references` are read at each execute; `plain` selects the twin of every fast path;
    `grouping` says where adapters of a kind run as one. Of a backbone on several ranks: `overlap` lets passes of a slot
    overlap, in an order that follows from `times`, the same on all ranks."""

    _takes_turns = True  # passes over layers that several ranks hold: each is cut at its exchanges

    def __init__(
        self,
        backbone: Backbone,
        tasks: Mapping[str, Task],
        sources: Mapping[str, Source],
        references: References,
        *,
        plain: bool = False,
        grouping: Rule = measured,
        overlap: bool = True,
        times: TimesOf = by_rows,
    ) -> None:
        self._backbone = backbone
        cut = self._takes_turns and isinstance(backbone, ShardedBackbone) and not plain
        self._subgraphs = Subgraphs(cast("ShardedBackbone", backbone)) if cut else None
        self._overlap = overlap
        self._times = times
        self._record: Record | None = None
        self._tasks = tasks
        self._sources = sources
        self._references = references
        self._plain = plain
        self._grouping = grouping
        self._cut = CutSequences()
        self._scored = Ledger()

    @contextmanager
    def recording(self, clock: Callable[[], float]) -> Iterator[Record | StageRecord]:
        """Note what runs when, while the block lasts: passes that train."""
        self._record = Record(clock)
        try:
            yield self._record
        finally:
            self._record = None

    def execute(self, schedule: RoundSchedule) -> RoundRecord:
        """Run every action in order.

        Raises StateError or DataError, before anything has run, for an illegal schedule or one that names what is not
        there or not for this backbone. Where an action raises, PassError with the record of those before it: the steps
        in it are applied, while the tasks whose step is still in progress lose it, gradient and all - a step counts
        once or never. RankError where another rank is lost, which is the end of all tasks here.
        """
        self._check(schedule)
        began = time.perf_counter()
        records: list[ActionRecord] = []
        try:
            with flushing(self._backbone.flushes):
                for done in self._ran(schedule, began):
                    records.append(done)
        except BaseException as error:
            self._drop_steps(schedule, len(records))
            if not isinstance(error, Exception) or isinstance(error, RankError):
                raise
            record = RoundRecord(schedule, tuple(records), time.perf_counter() - began)
            slot = next((slot for slot in self._slots(schedule.actions) if slot.start == len(records)), range(1))
            raise PassError(brief(error), record, len(slot)) from error
        finally:
            self._cut.drop()
            self._scored.drop()
        return RoundRecord(schedule, tuple(records), time.perf_counter() - began)

    def _ran(self, schedule: RoundSchedule, began: float) -> Iterator[ActionRecord]:
        """What each action came to, in the order of the schedule; those of a slot at once."""
        for slot in self._slots(schedule.actions):
            actions = schedule.actions[slot.start : slot.stop]
            if len(slot) == 1:
                yield self._run(slot.start, actions[0], began)
            else:
                yield from self._run_slot(slot.start, actions, began)

    def _run(self, index: int, action: Action, began: float) -> ActionRecord:
        start_s = time.perf_counter() - began
        if isinstance(action, OptimStep):
            step = self._tasks[action.task].optimizer_step(action.lr)
            return ActionRecord(index, start_s, time.perf_counter() - began, step=step)
        items, rows = self._micro_batch(action)
        return ActionRecord(index, start_s, time.perf_counter() - began, rows, items)

    def _slots(self, actions: Sequence[Action]) -> list[range]:
        """What runs together."""
        if self._subgraphs is None or not self._subgraphs.cut:
            return [range(index, index + 1) for index in range(len(actions))]
        return slots(actions)

    def _run_slot(self, first: int, actions: Sequence[Action], began: float) -> list[ActionRecord]:
        """Several passes that train. What each took cannot be told apart from what it overlapped with: it is recorded
        with a share of the slot's time by its rows."""
        start_s = time.perf_counter() - began
        passes = [_Pass(batch, self._packed(batch)) for batch in actions if isinstance(batch, MicroBatch)]
        done = [
            (self._finished(one.batch, one.packed, losses), len(one.packed.rows.ids_T))
            for one, losses in zip(passes, self._train(passes), strict=True)
        ]
        share_s = (time.perf_counter() - began - start_s) / sum(rows for _, rows in done)
        records = []
        for index, (items, rows) in enumerate(done, start=first):
            end_s = start_s + rows * share_s
            records.append(ActionRecord(index, start_s, end_s, rows, items))
            start_s = end_s
        return records

    def _drop_steps(self, schedule: RoundSchedule, raised: int) -> None:
        """Of the tasks that the schedule trains, and of the one whose step it was that raised."""
        trained = {item.task for action in _passes(schedule) for item in action.items if item.kind == "train"}
        stepped = {action.task for action in schedule.actions[raised : raised + 1] if isinstance(action, OptimStep)}
        for task in trained | stepped:
            if task is not None:
                self._tasks[task].drop_pending()

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
        for place, ref in enumerate(item.sequences):
            least, held = _tokens_of(source, ref.index)
            if not least <= ref.whole <= held or held == 0:
                raise StateError(f"sequence {ref.index} has {held} tokens, not {ref.whole}", where=item.source)
            if ref.shared:
                self._check_shared(item, ref, item.sequences[place - 1].index)
            lead = self._tasks[item.task].adapter.lead if item.task is not None else 0
            before = source.states[ref.index].cached if isinstance(source, DecodeSource) else 0
            what, where = f"sequence {ref.index}", item.source
            require_known(_ids_of(source, ref.index), self._backbone, what=what, where=where, before=before, lead=lead)
            if _compares(item) and self._references.value(item.source, ref.index) is None:
                raise StateError(
                    f"the backbone's log-probability of sequence {ref.index} is not known",
                    where=item.source,
                    hint="compute it first: Engine.refer",
                )

    def _check_shared(self, item: WorkItem, ref: SequenceRef, before: int) -> None:
        ids, other = (_ids_of(self._sources[item.source], index)[: ref.shared] for index in (ref.index, before))
        if not np.array_equal(ids, other):
            raise StateError(f"sequence {ref.index} does not begin as sequence {before} does", where=item.source)
        if item.kind == "train" and item.task is not None and self._tasks[item.task].adapter.stochastic:
            raise StateError("rows that drop out are nobody else's: they cannot be shared", where=item.task)

    def _micro_batch(self, batch: MicroBatch) -> tuple[tuple[ItemOutcome, ...], int]:
        if all(item.kind == "decode" for item in batch.items):
            return (), run_decode(self._backbone, batch, self._tasks, self._sources, plain=self._plain)
        packed = self._packed(batch)
        losses = self._train([_Pass(batch, packed)])[0] if batch.trains else self._forward(packed, batch)
        return self._finished(batch, packed, losses), len(packed.rows.ids_T) if not batch.resumes else 0

    def _packed(self, batch: MicroBatch) -> PackedBatch:
        sources = {
            item.source: source
            for item in batch.items
            if not isinstance(source := self._sources[item.source], DecodeSource)
        }
        adapters = {item.task: self._tasks[item.task].adapter for item in batch.items if item.task is not None}
        return pack(batch, sources, adapters, self._cut, self._backbone.device, self._precision)

    def _finished(self, batch: MicroBatch, packed: PackedBatch, losses: TokenLosses) -> tuple[ItemOutcome, ...]:
        """What a pass that is back came to, added to the steps in progress."""
        for item in batch.items:
            self._cut.ran(item)
        outcomes = tuple(self._outcomes(packed, losses))
        for outcome in outcomes:
            if outcome.kind == "train" and outcome.task is not None:
                self._tasks[outcome.task].count(outcome)
        return outcomes

    @property
    def _precision(self) -> torch.dtype:
        return torch.promote_types(self._backbone.dtype, torch.float32)

    def _train(self, passes: Sequence[_Pass]) -> list[TokenLosses]:
        """Forward and back, all of them together."""
        work = [self._parts(one) for one in passes]
        if len(work) == 1 or not self._overlap:
            run_slot_plain(work, self._record)
        else:
            layers = len(self._backbone.blocks)
            run_slot(work, order_of([self._times(one.batch).both(layers) for one in passes]), self._record)
        return [one.losses for one in passes if one.losses is not None]

    def _parts(self, one: _Pass) -> list[Part]:
        batch = one.batch
        tasks = tuple(item.task for item in batch.items if item.task is not None)
        forth = StageAction("forward", batch.htask, batch.chunk, 0)
        back = StageAction("backward", batch.htask, batch.chunk, 0)
        return [Part(forth, tasks, self._pass_forth(one)), Part(back, tasks, self._pass_back(one))]

    def _pass_forth(self, one: _Pass) -> Steps[None]:
        """Up to the losses and their gradient, which is what the way back begins with."""
        packed, batch = one.packed, one.batch
        if self._subgraphs is not None and not batch.keep:
            yield from self._through_layers(self._subgraphs, one)
        with torch.enable_grad():
            hidden_TD = self._hidden_of(one)
            rows_UD, place_N = gather(hidden_TD, packed)
        rows_ND = rows_UD.detach() if place_N is None else rows_UD.detach()[place_N]
        one.losses = self._losses(rows_ND, self._weighed(rows_ND, packed))
        if rows_UD.requires_grad:  # else nothing below the head is trained
            one.ends = rows_UD, gathered_gradient(one.losses, rows_UD, place_N)

    def _through_layers(self, subgraphs: Subgraphs, one: _Pass) -> Steps[None]:
        """Embedding and loss exchange too, but wait at once: they come once a pass, and all but the rows' gradient is
        small."""
        rows, current = one.packed.rows, self._pass(one.packed)
        with torch.enable_grad():
            prelude = self._backbone.begin(rows.ids_T, rows.positions_T, current)
        every = range(len(self._backbone.blocks))
        one.chain = subgraphs.chain(prelude, current, layers=every, recompute=one.batch.recompute)
        last_TD = yield from one.chain.forward(prelude.x_TD)
        one.between = _Between(current, prelude.x_TD, last_TD)

    def _hidden_of(self, one: _Pass) -> Tensor:
        """What the head takes, under autograd."""
        if one.between is not None:
            return self._backbone.finish(one.between.last_TD, one.between.current)
        return self._cut.take(one.batch) if one.batch.keep else self._hidden(one.packed, one.batch.recompute)

    def _pass_back(self, one: _Pass) -> Steps[None]:
        if one.ends is None:
            return
        (rows_UD, grad_UD), one.ends = one.ends, None
        torch.autograd.backward([rows_UD], [grad_UD])
        between, one.between = one.between, None
        if one.chain is None or between is None or between.last_TD.grad is None:
            return
        grad_TD = yield from one.chain.backward(between.last_TD.grad)
        if grad_TD is not None and between.first_TD.requires_grad:
            torch.autograd.backward([between.first_TD], [grad_TD])

    @torch.no_grad()
    def _forward(self, packed: PackedBatch, batch: MicroBatch) -> TokenLosses:
        with torch.set_grad_enabled(batch.keep):
            hidden_TD = self._hidden(packed)
        if batch.keep:
            self._cut.keep(batch, hidden_TD)
        return self._losses(hidden_TD[packed.predict_N], packed)

    def _hidden(self, packed: PackedBatch, recompute: bool = False) -> Tensor:
        rows = packed.rows
        return self._backbone.hidden(rows.ids_T, rows.positions_T, self._pass(packed), recompute=recompute)

    def _pass(self, packed: PackedBatch) -> Pass:
        """Who attends to whom in these rows, and which adapter has which of them."""
        dispatches = [
            Dispatch(rows.start, rows.stop, self._tasks[rows.item.task].adapter, self._keys(rows))
            for rows in packed.items
            if rows.item.task is not None
        ]
        rows = packed.rows
        hooked = hooks(dispatches, plain=self._plain, grouping=self._grouping, joined=self._backbone.groups)
        return Pass(AttentionContext(rows.segments, self._cut.carry), hooked, rows.given)

    def _losses(self, rows_ND: Tensor, packed: PackedBatch) -> TokenLosses:
        losses_of = token_losses_plain if self._plain else token_losses
        hooked = hooked_rows(self._gathered(packed), self._backbone.head)
        return losses_of(self._backbone.head, rows_ND, packed.target_N, packed.weight_N, hooked)

    def _gathered(self, packed: PackedBatch) -> list[Dispatch]:
        """Whose the gathered rows are, for the adapters that hook the head."""
        found = []
        for rows in packed.items:
            adapter = self._tasks[rows.item.task].adapter if rows.item.task is not None else None
            if adapter is not None and self._backbone.head.name in adapter.modules:
                keys = self._keys(rows)
                own_keys = keys.at(packed.predict_N[rows.first : rows.last] - rows.start) if keys is not None else None
                found.append(Dispatch(rows.first, rows.last, adapter, own_keys))
        return found

    def _weighed(self, rows_ND: Tensor, packed: PackedBatch) -> PackedBatch:
        """With the weights of dpo's tokens put in, after a look at their rows without gradients."""
        compared = [rows for rows in packed.items if _compares(rows.item)]
        if not compared:
            return packed
        own_N, part = gathered(packed, compared)
        seen_N = self._losses(rows_ND[own_N], part).logprob_N.double().cpu().numpy()
        weights = [
            rows.together(self._comparison(rows, rows.each(seen_N[rows.first : rows.last])).weight_n)
            for rows in part.items
        ]
        assert packed.weight_N is not None
        weight_N = torch.from_numpy(np.concatenate(weights)).to(packed.weight_N)
        return replace(packed, weight_N=packed.weight_N.index_copy(0, own_N, weight_N))

    def _comparison(self, rows: ItemRows, logprob_n: npt.NDArray[np.float64]) -> Comparison:
        item = rows.item
        assert item.loss is not None
        parted, indices = parts_pair(item), [ref.index for ref in item.sequences]
        if parted:
            indices = [indices[0] & ~1, indices[0] | 1]
        held = [self._references.value(item.source, index) for index in indices]
        references = [value for value in held if value is not None]
        if parted:
            return compare_part(item, self._scored.pair(item), len(logprob_n), references, item.loss)
        return compare(logprob_n, rows.counts, references, item.loss)

    def _outcomes(self, packed: PackedBatch, losses: TokenLosses) -> list[ItemOutcome]:
        """Per item, summed in float64 in the order of its tokens, so that no co-runner can change a bit."""
        logprob_N, correct_N = losses.logprob_N.double().cpu().numpy(), losses.correct_N.cpu().numpy()
        outcomes = []
        for rows in packed.items:
            item, own = rows.item, slice(rows.first, rows.last)
            logprob_m, correct_m = rows.each(logprob_N[own]), rows.each(correct_N[own])
            if _compares(item) and parts_pair(item) and item.kind != "train":
                self._scored.add(item, logprob_m)
            if item.kind in ("carry", "score"):
                continue  # it comes to nothing by itself: its tokens are counted when they train
            loss_sum, correct, pairs = float(-logprob_m.sum()), int(correct_m.sum()), None
            if _compares(item):
                found = self._comparison(rows, logprob_m)
                loss_sum, correct, pairs = found.loss_sum, found.preferred, found.sums
            logprobs = tuple(logprob_m.tolist()) if item.kind == "reference" else None
            told = loss_sum, rows.tokens, correct, item.tokens, logprobs, pairs
            outcomes.append(ItemOutcome(item.task, item.kind, *told))
        return outcomes

    def _keys(self, rows: ItemRows) -> RowKeys | None:
        assert rows.item.task is not None
        task = self._tasks[rows.item.task]
        if rows.item.kind not in ("train", "carry", "score") or not task.adapter.stochastic:
            return None
        return row_keys(task.job.seed, task.step, rows.example_t, rows.position_t, self._backbone.device)


@dataclass(frozen=True, slots=True)
class _Between:
    """What lies between the subgraphs of a pass: the rows that enter its layers, and those that leave them."""

    current: Pass
    first_TD: Tensor
    last_TD: Tensor


@dataclass(slots=True)
class _Pass:
    """A micro-batch as far as it is: its losses once the head has run, and what its way back begins with."""

    batch: MicroBatch
    packed: PackedBatch
    losses: TokenLosses | None = None
    ends: tuple[Tensor, Tensor] | None = None
    chain: LayerChain | None = None
    between: _Between | None = None


def _passes(schedule: RoundSchedule) -> list[MicroBatch]:
    return [action for action in schedule.actions if isinstance(action, MicroBatch)]


def gather(hidden_TD: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor | None]:
    """The rows that predict, each once, and which of them each trained position has where some have the same: gradients
    of a row are to be added in a fixed order."""
    if not packed.repeats:
        return hidden_TD[packed.predict_N], None
    row_U, place_N = packed.predict_N.unique(return_inverse=True)
    return hidden_TD[row_U], place_N


def gathered_gradient(losses: TokenLosses, rows_UD: Tensor, place_N: Tensor | None) -> Tensor:
    """Of the rows that `gather` found."""
    assert losses.grad_ND is not None
    if place_N is None:
        return losses.grad_ND
    return torch.zeros_like(rows_UD).index_add_(0, place_N, losses.grad_ND)


def _ids_of(source: Source, index: int) -> Ids:
    """The tokens that a reference to this sequence brings to a pass."""
    if isinstance(source, DecodeSource):
        state = source.states[index]
        return state.ids[state.cached :]
    return source[index].ids


def _tokens_of(source: Source, index: int) -> tuple[int, int]:
    """The fewest tokens that a reference to this sequence must say that it has, and the most; 0 where there is none."""
    if isinstance(source, DecodeSource):
        return source.waiting(index), source.waiting(index)
    if not 0 <= index < len(source):
        return 0, 0
    return source[index].input_tokens, len(source[index])


def _compares(item: WorkItem) -> bool:
    """Whether the item's loss is one of pairs."""
    return item.loss is not None and item.loss.kind == "dpo"
