"""What a task's items of one schedule came to together.

Sums add up; log-probabilities are put back into the order of the batch, which chunks do not keep
(`muxtune.plan.align`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from muxtune.data.types import TokenSequence
from muxtune.plan.types import ItemOutcome, MicroBatch, RoundRecord, WorkItem


def merged(record: RoundRecord, task: str | None, sequences: Sequence[TokenSequence]) -> ItemOutcome:
    """Of all items of `task`, whose sequences are `sequences`, each of them there once."""
    parts: list[ItemOutcome] = []
    logprobs: dict[tuple[int, int], tuple[float, ...]] = {}
    for item, outcome in _ran(record):
        if item.task != task:
            continue
        parts.append(outcome)
        done = 0
        for ref in item.sequences if outcome.logprobs is not None else ():
            count = int(sequences[ref.index].mask[ref.start + 1 : ref.stop + 1].sum())
            logprobs[ref.index, ref.start] = (outcome.logprobs or ())[done : done + count]
            done += count
    first = parts[0]
    return ItemOutcome(
        task,
        first.kind,
        reduce(add, (part.loss_sum for part in parts)),  # as the task itself adds them up
        sum(part.tokens for part in parts),
        sum(part.correct for part in parts),
        sum(part.input_tokens for part in parts),
        tuple(value for _, values in sorted(logprobs.items()) for value in values) if logprobs else None,
        reduce(add, pairs) if (pairs := [part.pairs for part in parts if part.pairs is not None]) else None,
    )


def _ran(record: RoundRecord) -> Iterator[tuple[WorkItem, ItemOutcome]]:
    for done in record.actions:
        action = record.schedule.actions[done.action]
        if isinstance(action, MicroBatch):
            told = [item for item in action.items if item.kind not in ("carry", "score")]
            yield from zip(told, done.items, strict=True)
