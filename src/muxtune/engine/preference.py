"""Direct preference optimization (Rafailov 2023): what a batch of pairs comes to, and what each token weighs in it.

    r = beta (log p - log q)      of a response: p the task's model, q the bare backbone, summed over trained tokens
    m = r(chosen) - r(rejected)
    L = mean over the pairs of the optimizer batch of -log sigmoid(m)
    dL/d(-log p of a token) = +- beta sigmoid(-m) / pairs         + in the chosen response, - in the rejected one

The boundary: numbers in, numbers out, in float64 and in the order of the tokens, so that no co-runner changes a bit.
Whether a number is finite is for the task to judge: NaN and infinity go through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from muxtune.plan.types import LossSpec, PairSums, WorkItem

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the pairs of one item: `weight_n` is dL/d(-log p) of each token, `preferred` counts positive margins."""

    loss_sum: float
    preferred: int
    sums: PairSums
    weight_n: Floats


def compare(logprob_n: Floats, counts: Sequence[int], references: Sequence[float], loss: LossSpec) -> Comparison:
    """Args:
    logprob_n: of the trained tokens of all sequences, chosen and rejected in turn.
    counts: trained tokens of each sequence.
    references: log q of each sequence.
    """
    rewards = [
        loss.beta * (total - reference)
        for total, reference in zip(sequence_sums(logprob_n, counts), references, strict=True)
    ]
    loss_sum, preferred, weights = 0.0, 0, []
    for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True):
        margin = chosen - rejected
        loss_sum += softplus(-margin)
        preferred += margin > 0
        weight = loss.beta * sigmoid(-margin) / loss.denominator
        weights += [weight, -weight]
    sums = PairSums(len(rewards) // 2, sum(rewards[::2]), sum(rewards[1::2]))
    return Comparison(loss_sum, preferred, sums, np.repeat(np.array(weights, np.float64), counts))


class Ledger:
    """Sums of log-probabilities of the sequences of parted pairs, as their passes run. What is evaluated meanwhile is
    another matter than what is scored to train."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str | None, str, int, bool], float] = {}

    def add(self, item: WorkItem, logprob_n: Floats) -> None:
        """Those of an item's one sequence, or of a piece of it."""
        (ref,) = item.sequences
        key = self._key(item, ref.index)
        self._sums[key] = self._sums.get(key, 0.0) + float(logprob_n.sum())

    def pair(self, item: WorkItem) -> tuple[float, float]:
        """Of both sequences of the item's pair, chosen and rejected; 0 of one that has not begun."""
        chosen = item.sequences[0].index & ~1
        first, second = (self._sums.get(self._key(item, index), 0.0) for index in (chosen, chosen + 1))
        return first, second

    def drop(self) -> None:
        self._sums.clear()

    @staticmethod
    def _key(item: WorkItem, index: int) -> tuple[str | None, str, int, bool]:
        return item.task, item.source, index, item.kind == "eval"


def compare_part(
    item: WorkItem, sums: tuple[float, float], count: int, references: Sequence[float], loss: LossSpec
) -> Comparison:
    """What an item of a parted pair comes to: `sums` and `references` are of its chosen and rejected sequence, `count`
    its own trained tokens. The pair counts in one of its items only (`muxtune.plan.types`)."""
    (ref,) = item.sequences
    whole = compare(np.array(sums), (1, 1), references, loss)
    weight_n = np.full(count, whole.weight_n[ref.index % 2])
    if ref.stop == ref.whole and ref.index % 2 == (0 if item.kind == "train" else 1):
        return replace(whole, weight_n=weight_n)
    return Comparison(0.0, 0, PairSums(), weight_n)


def sequence_sums(logprob_n: Floats, counts: Sequence[int]) -> list[float]:
    """Of each sequence's tokens, in order; 0 of none."""
    ends = np.cumsum(counts)
    return [float(logprob_n[end - count : end].sum()) for end, count in zip(ends, counts, strict=True)]


def softplus(x: float) -> float:
    """log(1 + e^x), for any x."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x))) if not math.isnan(x) else x


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), for any x."""
    small = math.exp(-abs(x))
    return 1 / (1 + small) if x >= 0 else small / (1 + small)
