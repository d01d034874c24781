"""What tasks bring to a round, as the planner sees it: integers and names, of one typical optimizer step each.

A load says nothing of which examples run; the chunks of a real round are the task's own (`muxtune.plan.align`). Loads
are what fusion, prediction and simulation are made on, and they can be made from a config file and its data alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from muxtune.spec.peft import PeftBase, type_name

BARE = "none"  # the label of rows without an adapter
DROPPING = "+dropout"  # ends the label of an adapter whose input drops out: the masks are made anew in each pass


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence, or of a piece of it, in a chunk. `positions`: what the last of them sees - itself, what
    came before it in the sequence, a learned prefix."""

    rows: int
    positions: int


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """One chunk: `trained` rows go through the head; one that does not train only goes forward (a carried piece).
    `compared`: rows of dpo, which go through the head once more to find out what they weigh. `resumes`: it trains from
    the activations that its first pass has kept, and does not go forward again. `shared`: tokens that rows of other
    sequences stand for, beside their own."""

    spans: tuple[Span, ...]
    trained: int
    trains: bool = True
    compared: int = 0
    resumes: bool = False
    shared: int = 0

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)

    @property
    def longest(self) -> int:
        return max(span.positions for span in self.spans)


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """A task: the chunks of one optimizer step, in order, and its adapter.

    Attributes:
        adapter: the label of its PEFT type (`label_of`), under which the operator table knows what it costs.
        parameters, state_bytes: trainable numbers; bytes of these, their gradient and moments.
        widest: rows of its largest chunk in any step; 0 where that of `chunks` is.
        farthest: positions that a row of any step sees at most; 0 where one of `chunks` does.
        carried: positions whose keys and values, and their gradient, it holds while a cut sequence runs.
        steps: optimizer steps that it has left.
        kept: rows of its longest cut sequence, whose activations may be kept between passes.
        points: attach points that its adapter hooks; 0: as many as the operator table's.
    """

    name: str
    chunks: tuple[ChunkLoad, ...]
    adapter: str = "lora"
    parameters: int = 0
    state_bytes: int = 0
    widest: int = 0
    carried: int = 0
    steps: int = 1
    points: int = 0
    farthest: int = 0
    kept: int = 0

    @property
    def tokens(self) -> int:
        """Of one step, those that train: its rows, each as often as sequences share it; those that are carried run
        again then, and count once."""
        return sum(chunk.rows + chunk.shared for chunk in self.chunks if chunk.trains)

    @property
    def peak_rows(self) -> int:
        return max(self.widest, *(chunk.rows for chunk in self.chunks))

    @property
    def longest(self) -> int:
        return max(self.farthest, *(chunk.longest for chunk in self.chunks))

    @property
    def slots(self) -> dict[tuple[int, int], ChunkLoad]:
        """Its chunks by the pass of an hTask in which each runs: (p, i) is the i-th chunk that goes forward only before
        the p-th one that trains; the latter is (p, TRAINS); (p, RESUMES - i) are those that resume after it, the last
        of them i = 0. Passes run in the order of these keys, each with every member that has one
        (`muxtune.plan.round`)."""
        found: dict[tuple[int, int], ChunkLoad] = {}
        trained = waiting = 0
        for place, chunk in enumerate(self.chunks):
            if chunk.resumes:
                later = sum(1 for _ in takewhile(lambda one: one.resumes, self.chunks[place + 1 :]))
                found[trained - 1, RESUMES - later] = chunk
            elif chunk.trains:
                found[trained, TRAINS] = chunk
                trained, waiting = trained + 1, 0
            else:
                found[trained, waiting] = chunk
                waiting += 1
        return found


Member = tuple[TaskLoad, ChunkLoad]  # a task and what it runs in a pass
TRAINS = 2**31 - 1  # sorts behind every chunk that only goes forward
RESUMES = 2 * TRAINS  # and this, less whatever number there is, behind that


def passes(members: Sequence[TaskLoad]) -> Iterator[list[Member]]:
    """The passes of an hTask, in order: who runs which chunk together."""
    slots = [load.slots for load in members]
    for slot in sorted(set().union(*slots)):
        yield [(load, own[slot]) for load, own in zip(members, slots, strict=True) if slot in own]


def packed_rows(members: Sequence[TaskLoad]) -> int:
    """Of the largest pass that these make together in any step."""
    return sum(load.peak_rows for load in members)


def padded_to_longest(members: Sequence[TaskLoad]) -> int:
    """The same where every sequence takes as many rows as the longest of all; of the typical step."""
    longest = max(span.rows for load in members for chunk in load.chunks for span in chunk.spans)
    padded = longest * sum(max(len(chunk.spans) for chunk in load.chunks) for load in members)
    return max(padded, packed_rows(members))


def widest_span(running: Sequence[Member]) -> int:
    """Rows of the longest sequence of a pass: what each of them takes where all are padded to it."""
    return max(span.rows for _, chunk in running for span in chunk.spans)


def label_of(peft: PeftBase) -> str:
    """What an adapter goes by in the operator table: the short name of its type (`dora`, `houlsby`), and whether it
    drops out."""
    return type_name(peft) + (DROPPING if peft.drops_out else "")
