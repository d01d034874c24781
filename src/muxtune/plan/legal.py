"""Which schedules may run: the rules of the vocabulary, checked on integers before anything runs.

A micro-batch trains, or goes forward only (eval, reference), or decodes; it names a task at most once. A train item has
a task and a denominator, the same in all of a task's items. An optimizer step has a gradient to apply and comes once,
after the task's last train item; a rate of its own is a number from 0 up. A dpo item holds whole pairs. The pieces of a
cut sequence come in the one order in which each finds the keys and values that it sees, and then the gradients that it
is owed; whole ones may share tokens with the whole one before them, but for one at least. Where a pass of carried
pieces is kept, the same pieces train together, in a pass that goes on from it. Whether tasks and sequences exist is for
whoever holds them to say.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from muxtune.errors import StateError
from muxtune.plan.types import LossSpec, MicroBatch, OptimStep, RoundSchedule, SequenceRef, WorkItem

_PASS_OF = {
    "train": "train",
    "carry": "forward-only",
    "score": "forward-only",
    "eval": "forward-only",
    "reference": "forward-only",
    "decode": "decode",
}


_Half = tuple[str | None, str, int, bool]


def require_legal(schedule: RoundSchedule, pending: Collection[str] = ()) -> None:
    """Raises StateError for the first rule broken. `pending`: tasks that have a gradient from earlier schedules."""
    losses: dict[str, LossSpec] = {}
    with_gradient, stepped = set(pending), set[str]()
    cuts, parted, kept = _Cuts({}), _Parted({}), _Kept({})
    for action in schedule.actions:
        if isinstance(action, OptimStep):
            _require(action.task in with_gradient, "has no gradient to apply", action.task)
            cuts.require_done(action.task)
            _require(_is_rate(action.lr), f"a learning rate of {action.lr} cannot be applied", action.task)
            with_gradient.remove(action.task)
            stepped.add(action.task)
            continue
        _require_one_pass(action)
        kept.run(action)
        for item in action.items:
            _require_shared(item)
            cuts.run(item)
            parted.run(item)
            if item.kind == "train":
                task, loss = _trained(item)
                _require(task not in stepped, "trains again after its optimizer step", task)
                agreed = losses.setdefault(task, loss)
                _require(loss == agreed, "has two losses or denominators for one optimizer step", task)
                with_gradient.add(task)
    cuts.require_done()
    parted.require_done()


def _require_one_pass(batch: MicroBatch) -> None:
    passes = {_PASS_OF[item.kind] for item in batch.items}
    _require(len(passes) == 1, f"a micro-batch is of one kind, not {' and '.join(sorted(passes)) or 'empty'}")
    named = [item.task for item in batch.items]
    _require(len(named) == len(set(named)), "a micro-batch names a task twice")
    for item in batch.items:
        _require(bool(item.sequences), "an item has no sequences", item.source)
        _require(all(ref.length > 0 for ref in item.sequences), "a sequence has no tokens", item.source)
        if item.loss is not None and item.loss.kind == "dpo":
            _require(item.kind in ("train", "score", "eval"), "dpo does not compare here", item.source)
            _require(item.loss.beta > 0, "dpo without a beta", item.source)
            whole = _whole_pairs(item) and item.kind != "score"
            _require(whole or parts_pair(item), "dpo goes by whole pairs, the chosen one first", item.source)
        else:
            _require(item.kind != "score", "only dpo is scored", item.source)
    if passes == {"decode"}:
        slots = [ref.index for item in batch.items for ref in item.sequences]
        _require(len({item.source for item in batch.items}) == 1, "a decode micro-batch has one source")
        _require(len(slots) == len(set(slots)), "a decode micro-batch names a sequence twice")


def _require_shared(item: WorkItem) -> None:
    """Whether what sequences share with those before them can be there."""
    before = 0  # tokens of a whole sequence
    for ref in item.sequences:
        where = f"{item.source}[{ref.index}]"
        if ref.shared:
            _require(not ref.cut and item.kind != "decode", "only whole sequences share tokens", where)
            possible = 0 < ref.shared < ref.length and ref.shared <= before
            _require(possible, "shares tokens that the sequence before it does not have", where)
        before = 0 if ref.cut else ref.length


def _is_rate(lr: float | None) -> bool:
    return lr is None or (math.isfinite(lr) and lr >= 0)


def _whole_pairs(item: WorkItem) -> bool:
    places = [ref.index for ref in item.sequences]
    chosen, rejected = places[::2], places[1::2]
    return all(place % 2 == 0 for place in chosen) and [place + 1 for place in chosen] == rejected


def parts_pair(item: WorkItem) -> bool:
    """Whether a dpo item holds one sequence, or a piece of it, of a pair that is not in one pass."""
    return len(item.sequences) == 1


def _trained(item: WorkItem) -> tuple[str, LossSpec]:
    if item.task is None:
        raise StateError("the bare backbone cannot train", where=item.source)
    if item.loss is None or item.loss.denominator < 1:
        raise StateError("a train item needs a denominator of at least 1", where=item.task)
    return item.task, item.loss


def _require(legal: bool, message: str, where: str | None = None) -> None:
    if not legal:
        raise StateError(message, where=where, hint="mend the schedule; nothing of it has run")


@dataclass(slots=True)
class _Cut:
    """A cut sequence under way: `held` tokens have gone forward, those before `owing` have still to train."""

    held: int
    owing: int


@dataclass(slots=True)
class _Cuts:
    """Those under way, by task, source and index."""

    open: dict[tuple[str | None, str, int], _Cut]

    def run(self, item: WorkItem) -> None:
        for ref in item.sequences:
            if ref.cut:
                _require(item.kind != "decode", "a decode has no pieces", item.source)
                self._run(item, ref)
            else:
                _require(ref.start == 0, "a piece that does not say of what", item.source)
                _require(item.kind != "carry", "only a cut sequence is carried", item.source)

    def _run(self, item: WorkItem, ref: SequenceRef) -> None:
        key, where = (item.task, item.source, ref.index), f"{item.source}[{ref.index}]"
        _require(ref.start >= 0 and ref.stop <= ref.whole, "a piece beyond its sequence", where)
        cut = self.open.setdefault(key, _Cut(0, ref.whole))
        if item.kind == "train":
            _require(ref.start <= cut.held, "a piece trains before those that it sees have gone forward", where)
            _require(ref.stop == cut.owing, "pieces train from the last to the first", where)
            cut.owing = ref.start
        else:
            untouched = cut.owing == ref.whole
            _require(untouched and ref.start == cut.held, "pieces go forward from the first to the last", where)
            cut.held = ref.stop
        if cut.owing == 0 or (item.kind not in ("train", "carry", "score") and cut.held == ref.whole):
            del self.open[key]

    def require_done(self, task: str | None = None) -> None:
        """Of one task, or of all."""
        for owner, source, index in self.open:
            _require(task is not None and task != owner, "a cut sequence is not done", f"{source}[{index}]")


@dataclass(slots=True)
class _Kept:
    """The passes that keep their activations and have not trained yet, by task, source and index of their pieces."""

    open: dict[tuple[str | None, str, int], list[MicroBatch]]

    def run(self, batch: MicroBatch) -> None:
        _require(not (batch.keep and batch.recompute), "what is kept is not recomputed")
        if batch.resumes:
            self._resume(batch)
        elif batch.keep:
            for item in batch.items:
                _require(item.kind == "carry", "only a pass of carried pieces is kept", item.source)
            for key, _ in _pieces(batch):
                self.open.setdefault(key, []).append(batch)
        elif batch.trains:
            for key, ref in _pieces(batch):
                held = [one for own, one in _pieces(self.open[key][-1]) if own == key] if self.open.get(key) else []
                untouched = all(ref.start >= one.stop for one in held)
                _require(untouched, "a piece that is kept trains from what was kept", f"{key[1]}[{key[2]}]")

    def _resume(self, batch: MicroBatch) -> None:
        """Pieces train from the last to the first, so the pass is the newest one of each of its sequences."""
        for key, _ in _pieces(batch):
            newest = self.open.get(key, [])[-1:]
            same = bool(newest) and (newest[0].pieces, newest[0].width) == (batch.pieces, batch.width)
            _require(same, "no pass of exactly these pieces has been kept", f"{key[1]}[{key[2]}]")
        for key, _ in _pieces(batch):
            self.open[key].pop()


def _pieces(batch: MicroBatch) -> list[tuple[tuple[str | None, str, int], SequenceRef]]:
    return [((item.task, item.source, ref.index), ref) for item in batch.items for ref in item.sequences]


@dataclass(slots=True)
class _Parted:
    """The sequences of parted pairs, by (task, source, index, whether it is evaluated): how many of their tokens have
    been scored or evaluated, of how many."""

    seen: dict[_Half, tuple[int, int]]

    def run(self, item: WorkItem) -> None:
        if item.loss is None or item.loss.kind != "dpo" or not parts_pair(item):
            return
        (ref,) = item.sequences
        evaluated, where = item.kind == "eval", f"{item.source}[{ref.index}]"
        key, other = ((item.task, item.source, index, evaluated) for index in (ref.index, ref.index ^ 1))
        if item.kind == "train":
            known = self._done(key) and self._done(other)
            _require(known, "a parted pair trains before both its sequences have been scored", where)
            return
        tokens = self.seen.get(key, (0, ref.whole))[0] + ref.length
        _require(tokens <= ref.whole, "a sequence is scored twice", where)
        self.seen[key] = (tokens, ref.whole)
        if evaluated:
            self.seen.setdefault(other, (0, 1))
            _require(ref.index % 2 == 0 or self._done(other), "the chosen sequence comes first", where)

    def _done(self, key: _Half) -> bool:
        tokens, whole = self.seen.get(key, (0, 1))
        return tokens == whole

    def require_done(self) -> None:
        for key in self.seen:
            _require(not key[3] or self._done(key), "half a pair is evaluated", f"{key[1]}[{key[2]}]")
