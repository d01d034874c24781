"""One task: a job while it trains. Its adapter, optimizer, data order and counters - everything the job owns.

Which examples make up optimizer step s, in which order, and how they are split into chunks are pure functions of the
job, its data and s; nothing here ever looks at another task (design contract 1).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from muxtune.data.prefixes import by_beginning
from muxtune.data.sampler import Sampler
from muxtune.data.types import TokenSequence
from muxtune.engine.optim import FlatAdamW
from muxtune.engine.whole import OwnWhole, Whole
from muxtune.errors import StateError
from muxtune.peft.base import Adapter
from muxtune.plan.align import Likeness, Piece, align
from muxtune.plan.round import Participant
from muxtune.plan.types import ItemOutcome, PairSums, SequenceRef, StepOutcome
from muxtune.spec.job import JobSpec
from muxtune.spec.schedule import lr_at, total_steps
from muxtune.spec.status import JobStatus

LEAST_SHARED = 16  # tokens: fewer in common cost as much to share as to compute again (docs/log.md)


@dataclass(frozen=True, slots=True)
class Sequences:
    """A task's tokenised examples. `train[i].index` is i, which is also what dropout calls the example.

    In dpo they are pairs: sequences 2 p and 2 p + 1 are the chosen and the rejected one of pair p.
    """

    train: Sequence[TokenSequence]
    validation: Sequence[TokenSequence] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of the training sequences: ids, masks and order."""
        digest = hashlib.sha256()
        for sequence in self.train:
            sequence.feed(digest)
        return digest.hexdigest()


@dataclass(slots=True)
class _Pending:
    """Sums over the train items of the optimizer step in progress; `terms` is what `loss_sum` has that many of."""

    loss_sum: float = 0.0
    terms: int = 0
    tokens: int = 0
    correct: int = 0
    input_tokens: int = 0
    pairs: PairSums | None = None


class Task:
    """Args: `chunk_tokens` is the task's own chunk budget, fixed when it first starts; `plain` shares no prefixes;
    `norm` is that of `FlatAdamW`."""

    def __init__(
        self,
        job: JobSpec,
        adapter: Adapter,
        data: Sequences,
        *,
        chunk_tokens: int,
        plain: bool = False,
        norm: Callable[[], float] | None = None,
    ) -> None:
        self.job = job
        self.name = job.name
        self.adapter = adapter
        self.data = data
        self.chunk_tokens = chunk_tokens
        self.shares = job.share_prefixes and not plain
        self.optimizer = FlatAdamW(
            adapter.parameters, weight_decay=job.weight_decay, max_grad_norm=job.max_grad_norm, norm=norm
        )
        self.whole: Whole = OwnWhole(adapter, self.optimizer)  # another one where other ranks have parts of it
        groups = len(data.train) // job.group_size
        self.sampler = Sampler(max(1, groups), job.effective_batch, job.seed, shuffle=job.shuffle)
        self.status = JobStatus.QUEUED
        self.step = 0  # optimizer steps done
        self.trained_tokens = 0
        self.total_steps = total_steps(job, groups) if data.train else job.max_steps or 0
        self._pending = _Pending()
        self._fingerprint: str | None = None

    def become(self, status: JobStatus) -> None:
        self.status = self.status.become(status, job=self.name)

    @property
    def runnable(self) -> bool:
        return self.status in (JobStatus.QUEUED, JobStatus.RUNNING) and self.step < self.total_steps

    @property
    def train_source(self) -> str:
        return f"{self.name}/train"

    @property
    def validation_source(self) -> str:
        return f"{self.name}/validation"

    @property
    def epoch(self) -> float:
        return self.sampler.epoch_after(self.step)

    @property
    def data_fingerprint(self) -> str:
        """Of the training sequences; hashed when first asked for, since every checkpoint asks."""
        if self._fingerprint is None:
            self._fingerprint = self.data.fingerprint
        return self._fingerprint

    @property
    def finite(self) -> bool:
        """Whether every trainable number still is."""
        return self.whole.finite()

    def participant(self) -> Participant:
        """The next optimizer step as chunks of sequences."""
        if not self.data.train:
            raise StateError("has no training data to run on", where=self.name, hint="attach it with datasets")
        size = self.job.group_size
        indices = [size * group + place for group in self.sampler.batch(self.step) for place in range(size)]
        return self.bringing(self.train_source, self.data.train, indices)

    def validation_participant(self) -> Participant:
        """The whole validation set, forward only."""
        held_out = self.data.validation
        return self.bringing(self.validation_source, held_out, range(len(held_out)), forward=True)

    def bringing(
        self,
        source: str,
        sequences: Sequence[TokenSequence],
        indices: Sequence[int],
        *,
        group: int | None = None,
        forward: bool = False,
    ) -> Participant:
        """See `participant_of`; None: the job's groups."""
        group = group or self.job.group_size
        budget, shares = self.chunk_tokens, self.shares
        return participant_of(self.job, source, sequences, indices, budget, group, forward=forward, shares=shares)

    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return lr_at(self.job, self.step, self.total_steps)

    def count(self, outcome: ItemOutcome) -> None:
        """Add a train item to the optimizer step in progress."""
        pending = self._pending
        pending.loss_sum += outcome.loss_sum
        pending.terms += outcome.terms
        pending.tokens += outcome.tokens
        pending.correct += outcome.correct
        pending.input_tokens += outcome.input_tokens
        if outcome.pairs is not None:
            pending.pairs = (pending.pairs or PairSums()) + outcome.pairs

    @property
    def has_pending(self) -> bool:
        """Whether an optimizer step is in progress."""
        return self._pending.input_tokens > 0

    def drop_pending(self) -> None:
        """Forget the optimizer step in progress: nothing of it has been applied."""
        self._pending = _Pending()
        self.adapter.parameters.zero_gradient()

    def optimizer_step(self, lr: float | None = None) -> StepOutcome:
        """Apply the step in progress, or - where its loss or gradient is not finite - drop it and say so.

        Only the executor calls this, for a schedule that has been found legal.
        """
        assert self.has_pending, "a step without a gradient"
        pending, norm = self._pending, self.optimizer.gradient_norm()
        lr = self.learning_rate() if lr is None else lr
        loss = pending.loss_sum / max(1, pending.terms)
        error = None
        if not math.isfinite(loss):
            error = f"non_finite_loss: the loss is {loss}"
        elif not math.isfinite(norm):
            error = f"non_finite_gradient: the gradient's norm is {norm}"
        else:
            self.optimizer.step(lr, norm)
            self.adapter.refresh()
            self.step += 1
            self.trained_tokens += pending.tokens
        self.drop_pending()
        return StepOutcome(
            self.name,
            self.step,
            loss,
            pending.correct / max(1, pending.terms),
            pending.tokens,
            pending.input_tokens,
            norm,
            lr,
            error,
            pending.pairs,
        )


def participant_of(
    job: JobSpec,
    source: str,
    sequences: Sequence[TokenSequence],
    indices: Sequence[int],
    chunk_tokens: int,
    group: int,
    *,
    forward: bool = False,
    shares: bool = True,
) -> Participant:
    """Sequences `indices` of a source as chunks, with the denominator of them all: trained tokens, or pairs.

    `group` of them, in order, stay together. Virtual rows count as tokens do. `forward`: nothing of them is to train.
    `shares`: where it is exact, what they begin with alike is computed once; it is not where rows drop out in training,
    each in its own way.
    """
    chosen = [sequences[index] for index in indices]
    virtual = job.peft.virtual_rows
    likeness = None
    if shares and (forward or not job.peft.drops_out):
        likeness = likeness_of(*by_beginning(chosen, group), virtual)
    lengths = [sequence.input_tokens for sequence in chosen]
    chunks, carried = aligned(
        indices, lengths, chunk_tokens, virtual=virtual, group=group, forward=forward, likeness=likeness
    )
    terms = len(chosen) // group if group > 1 else int(np.sum([sequence.trained_tokens for sequence in chosen]))
    return Participant(job.name, source, chunks, terms or 1, virtual, job.method, job.beta or 0.0, carried)


def aligned(
    indices: Sequence[int],
    lengths: Sequence[int],
    chunk_tokens: int,
    *,
    virtual: int = 0,
    group: int = 1,
    forward: bool = False,
    likeness: Likeness | None = None,
) -> tuple[tuple[tuple[SequenceRef, ...], ...], frozenset[int]]:
    """Sequences `indices` of so many tokens as chunks (`muxtune.plan.align`), and which of these are carried.

    Each has `virtual` rows before it, which come with its first token.
    """
    budget = max(chunk_tokens, virtual + 1)
    rows = [length + virtual for length in lengths]
    chunks = align(rows, budget, group=group, forward=forward, likeness=likeness)

    def reference(piece: Piece) -> SequenceRef:
        start, stop, whole = max(0, piece.start - virtual), piece.stop - virtual, lengths[piece.place]
        of, shared = whole if stop - start < whole else None, max(0, piece.shared - virtual)
        return SequenceRef(indices[piece.place], stop - start, start, of, shared)

    carried = frozenset(number for number, chunk in enumerate(chunks) if chunk.kind == "carry")
    return tuple(tuple(map(reference, chunk.pieces)) for chunk in chunks), carried


def likeness_of(order: Sequence[int], common: Sequence[int], virtual: int = 0) -> Likeness:
    """Of sequences that have so many tokens in common with those before them, and `virtual` rows before each."""
    return Likeness(tuple(order), tuple(own + virtual if own >= LEAST_SHARED else 0 for own in common))
