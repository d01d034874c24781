"""The loads of the benchmark: which tasks train on which sequences at each step.

The main three: *light*, where a micro-batch is far too small to fill the machine and fusing should pay; *medium*, where
it is a quarter of what does; and *non-uniform*, where lengths differ between tasks and examples and most of the gain is
padding not computed. Lengths are those of real data (`benchmarks.lengths`); token ids are random, since the cost does
not depend on them. Only completions are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lengths import Length, stored_lengths
from muxtune.data.types import TokenSequence

Batch = tuple[TokenSequence, ...]

NON_UNIFORM = ("sst2",) * 3 + ("openbookqa",) * 3 + ("rte",) * 2


@dataclass(frozen=True, slots=True)
class Load:
    """`tasks[t][s]` is the micro-batch of task t at step s; every task has the same number of steps."""

    name: str
    tasks: tuple[tuple[Batch, ...], ...]

    @property
    def steps(self) -> int:
        return len(self.tasks[0])

    def real_tokens(self, step: int) -> int:
        """Tokens of all tasks' sequences at the step: what tokens per second are counted in."""
        return sum(len(sequence) for task in self.tasks for sequence in task[step])

    def trained_tokens(self, step: int) -> int:
        """Those of them that are targets."""
        return sum(sequence.trained_tokens for task in self.tasks for sequence in task[step])

    def padding(self) -> float:
        """Tokens of padded batches, each task by itself, over real tokens: all steps."""
        padded = sum(len(batch) * max(map(len, batch)) for task in self.tasks for batch in task)
        return padded / sum(self.real_tokens(step) for step in range(self.steps))


def light(
    steps: int, *, vocab: int, tasks: int = 8, tokens: int = 16, micro_batch: int = 1, name: str = "light"
) -> Load:
    """Each task's micro-batch is one example, or more of the same length, half prompt and half completion."""
    lengths = [Length(prompt=tokens // 2, completion=tokens - tokens // 2)] * (steps * micro_batch)
    return Load(name, tuple(_batches(lengths, micro_batch, seed, vocab) for seed in range(tasks)))


def medium(steps: int, *, vocab: int) -> Load:
    """Eight tasks, each with one example of 64 tokens."""
    return light(steps, vocab=vocab, tokens=64, name="medium")


def non_uniform(
    steps: int, *, vocab: int, micro_batch: int = 4, names: Sequence[str] = NON_UNIFORM, name: str = "non-uniform"
) -> Load:
    """A task for each of `names`, with the lengths of that data set: by default three SST-2, three OpenBookQA and two
    RTE jobs."""
    stored = stored_lengths()
    tasks = []
    for seed, one in enumerate(names):
        rng = np.random.default_rng(seed)
        drawn = rng.choice(len(stored[one]), size=steps * micro_batch, replace=steps * micro_batch > len(stored[one]))
        tasks.append(_batches([stored[one][i] for i in drawn], micro_batch, seed, vocab))
    return Load(name, tuple(tasks))


def uniform(steps: int, *, vocab: int, tasks: int = 8, micro_batch: int = 4) -> Load:
    """All tasks with the lengths of OpenBookQA."""
    return non_uniform(steps, vocab=vocab, micro_batch=micro_batch, names=("openbookqa",) * tasks, name="uniform")


def _batches(lengths: Sequence[Length], micro_batch: int, seed: int, vocab: int) -> tuple[Batch, ...]:
    rng = np.random.default_rng([seed, vocab])
    sequences = []
    for index, length in enumerate(lengths):
        ids = rng.integers(0, vocab, size=length.prompt + length.completion, dtype=np.int32)
        sequences.append(TokenSequence(index, ids, np.arange(len(ids)) >= length.prompt))
    return tuple(tuple(sequences[at : at + micro_batch]) for at in range(0, len(sequences), micro_batch))
