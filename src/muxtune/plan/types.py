"""The vocabulary of plans: what the executor is told to do, and what it says it did.

A `RoundSchedule` is one round - at most one optimizer step of each participant - as a list of actions in launch order.
It holds names, indices and integers only: frozen, serialisable, printable without a device. Sequences are named by
(source, index); the engine resolves them in the sources registered with it, and so it does the reference values that
dpo compares with. The executor does exactly what the schedule says and answers with a `RoundRecord` in the same
vocabulary.

The tokens of a sequence are its inputs: what comes after the last one that a target is predicted from is in no pass.
Sequences of an item that begin alike may lie as a tree: each shares its first tokens with the one before it, whose rows
stand for them too (ADR 14). Tokens count in every sequence that has them, rows once.

A sequence may be cut into pieces, each in a pass of its own. To train, its pieces first go forward from the first on
("carry": keys and values stay behind, nothing else; the last piece need not), and then train from the last to the
first: each runs again or, where its first pass has kept its activations, goes on from there. An eval or reference goes
through them once, from the first to the last. A pair of dpo that is not in one pass is parted into items of one
sequence or piece each; to train, all of it goes forward first ("score": its log-probabilities stay behind as well), and
a pair counts where the last token of its chosen sequence trains, or of its rejected one is evaluated.

Legal schedules: the items of one `MicroBatch` either all train or all only go forward; a task has at most one item in a
micro-batch; an `OptimStep` comes after the task's last train item; a task's items keep the task's own order; whole
sequences share tokens, at most all but one, with the whole one before them; a cut sequence is done when the schedule
ends, and when its task steps; what is kept trains in a pass of the same pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muxtune.spec.policy import Policy

WorkKind = Literal["train", "carry", "score", "eval", "reference", "decode"]
LossKind = Literal["sft", "dpo"]


@dataclass(frozen=True, slots=True)
class SequenceRef:
    """Sequence number `index` of its item's source, `length` tokens of it.

    All of it, or - where it is cut - the piece that begins with token `start` of `of`. Its first `shared` tokens are
    those of the sequence before it in the item, and have no rows of their own.
    """

    index: int
    length: int
    start: int = 0
    of: int | None = None
    shared: int = 0

    @property
    def cut(self) -> bool:
        return self.of is not None

    @property
    def computed(self) -> int:
        """Tokens that have rows of their own."""
        return self.length - self.shared

    def rows(self, virtual_rows: int) -> int:
        """With those that an adapter puts before a sequence, which come with its first token."""
        return self.computed + (virtual_rows if self.start == 0 and not self.shared else 0)

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def whole(self) -> int:
        """Tokens of the whole sequence."""
        return self.length if self.of is None else self.of


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What an item's loss is: a sum over `denominator`, which is that of the task's whole optimizer batch, all
    micro-batches (design contract 2).

        sft     of -log p over trained tokens; the denominator counts them
        dpo     of -log sigmoid(m) over pairs; the denominator counts these
                m = beta ((log p - log q)(chosen) - (log p - log q)(rejected)), q the bare backbone

    A dpo item's sequences are whole pairs - an even index of the source, the chosen response, then the next one - or it
    holds one sequence, or a piece of it, of a parted pair.
    """

    denominator: int
    kind: LossKind = "sft"
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A task's rows in one micro-batch. `task` None runs the bare backbone."""

    task: str | None
    kind: WorkKind
    source: str
    sequences: tuple[SequenceRef, ...]
    loss: LossSpec | None = None

    @property
    def tokens(self) -> int:
        return sum(ref.length for ref in self.sequences)

    @property
    def computed(self) -> int:
        """Of these, those that have rows of their own."""
        return sum(ref.computed for ref in self.sequences)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One pass of the backbone over the rows of all its items: micro-batch `chunk` of hTask `htask`.

    Every sequence takes at least `width` rows of the pass: those that it lacks are padding, which costs what rows cost
    and is nobody's. With `recompute` a pass that trains keeps each block's input rows only and runs the block again on
    its way back, which changes no bit. With `keep` a pass of carried pieces keeps all its activations, and the pass
    that trains the same pieces goes on from there, which changes none either.
    """

    htask: int
    chunk: int
    items: tuple[WorkItem, ...]
    width: int = 0
    recompute: bool = False
    keep: bool = False

    @property
    def tokens(self) -> int:
        return sum(item.tokens for item in self.items)

    @property
    def computed(self) -> int:
        """Tokens that have rows of their own."""
        return sum(item.computed for item in self.items)

    @property
    def resumes(self) -> bool:
        """Whether it goes on from what another pass has kept, without a forward pass of its own."""
        return self.keep and self.trains

    @property
    def pieces(self) -> tuple[tuple[str | None, str, tuple[SequenceRef, ...]], ...]:
        """What its rows are, in order, whatever is done with them."""
        return tuple((item.task, item.source, item.sequences) for item in self.items)

    @property
    def trains(self) -> bool:
        return any(item.kind == "train" for item in self.items)


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Clip, check and apply the accumulated gradient of one task, at rate `lr` or, None, at its own schedule's."""

    task: str
    lr: float | None = None


Action = MicroBatch | OptimStep


@dataclass(frozen=True, slots=True)
class RoundSchedule:
    round: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class PairSums:
    """What the pairs of an item came to: how many, and the sums of their rewards, beta (log p - log q)."""

    pairs: int = 0
    chosen: float = 0.0
    rejected: float = 0.0

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(self.pairs + other.pairs, self.chosen + other.chosen, self.rejected + other.rejected)


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What a train, eval or reference item came to: sums over its trained tokens - or over its pairs, of a dpo item.

    `correct` counts tokens that were the argmax, or pairs whose margin is positive. `logprobs` (one per trained token,
    in order) is kept for reference items only.
    """

    task: str | None
    kind: WorkKind
    loss_sum: float
    tokens: int
    correct: int
    input_tokens: int
    logprobs: tuple[float, ...] | None = None
    pairs: PairSums | None = None  # of a dpo item

    @property
    def terms(self) -> int:
        """How many terms `loss_sum` and `correct` are sums of: trained tokens, or pairs."""
        return self.tokens if self.pairs is None else self.pairs.pairs


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One applied optimizer step - or, with `error`, one that was refused before it changed anything."""

    task: str
    step: int
    loss: float
    accuracy: float
    tokens: int
    input_tokens: int
    grad_norm: float
    lr: float
    error: str | None = None
    pairs: PairSums | None = None  # of a dpo task's whole batch


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """`action` is the index in the schedule; times are seconds since the round began."""

    action: int
    start_s: float
    end_s: float
    rows: int = 0  # rows the backbone ran, padding included
    items: tuple[ItemOutcome, ...] = ()
    step: StepOutcome | None = None


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What ran, action by action, in the order of the schedule.

    One that ends before its schedule does is that of a round whose next action raised.
    """

    schedule: RoundSchedule
    actions: tuple[ActionRecord, ...]
    wall_s: float

    @property
    def rows(self) -> int:
        """Rows that the backbone ran."""
        return sum(action.rows for action in self.actions)

    @property
    def tokens(self) -> int:
        """Tokens of the sequences that it ran. Pieces that are carried run twice, unless they are kept."""
        return sum(batch.tokens for batch in self._passes)

    @property
    def computed(self) -> int:
        """Rows that were tokens: those that sequences share are one row. The others are padding, or learned ones."""
        return sum(batch.computed for batch in self._passes)

    @property
    def _passes(self) -> list[MicroBatch]:
        return [one for one in self.schedule.actions if isinstance(one, MicroBatch) and not one.resumes]

    @property
    def raised(self) -> Action | None:
        """The action that raised."""
        ran = len(self.actions)
        return self.schedule.actions[ran] if ran < len(self.schedule.actions) else None

    @property
    def done(self) -> frozenset[str | None]:
        """The tasks all of whose actions ran."""
        ran = len(self.actions)
        before, after = (
            {task for action in part for task in tasks_of(action)}
            for part in (self.schedule.actions[:ran], self.schedule.actions[ran:])
        )
        return frozenset(before - after)


def tasks_of(action: Action) -> tuple[str | None, ...]:
    """The tasks that take part in an action."""
    return (action.task,) if isinstance(action, OptimStep) else tuple(item.task for item in action.items)


@dataclass(frozen=True, slots=True)
class HTask:
    """Tasks fused in space. `rows` of its largest pass, `passes` and `predicted_s` of one iteration, optimizer steps
    included."""

    tasks: tuple[str, ...]
    rows: int
    passes: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs with whom until membership changes: an iteration is one optimizer step of every task.

    Attributes:
        htasks: in launch order; on a pipeline, members of a bucket are co-scheduled.
        buckets: places in `htasks`, each in one bucket.
        iteration_s: predicted.
        peak_bytes, cap_bytes: the most that it holds, predicted, and what there is (None: no limit).
    """

    policy: Policy
    htasks: tuple[HTask, ...]
    buckets: tuple[tuple[int, ...], ...]
    stages: int
    iteration_s: float
    peak_bytes: int
    cap_bytes: int | None = None
