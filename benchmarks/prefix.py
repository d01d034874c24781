"""Examples that begin alike: our engine with their beginning computed once against itself without.

*chat*: 8 examples a step, a system prompt of 200 tokens common to all and rests of 30, the last 12 of them trained.
*pairs*: 4 preference pairs a step, prompts of 200 tokens, responses of 30, all of them trained; what the bare backbone
says of them is part of the step that asks. *apart*: 8 examples of 230 tokens that have nothing in common: what looking
for it costs. Rests and responses are between half and one and a half times as long. LoRA r 8 on all linears; token ids
are random. Both sides run step by step on one backbone, interleaved, from the same start values, so their losses agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.timing import interleave, ratio
from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.spec.job import JobSpec

SHARED, APART = "computed once", "computed for each"
HEAD, REST, TRAINED = 200, 30, 12
EXAMPLES = {"chat": 8, "pairs": 4, "apart": 8}
LOSS_TOLERANCE = 1e-4  # relative


@dataclass(frozen=True, slots=True)
class PrefixCosts:
    """One kind of data. `rows` and `seconds` of a step, by side; `times` is how much faster the first one is."""

    kind: str
    tokens: float
    rows: Mapping[str, float]
    seconds: Mapping[str, tuple[float, ...]]
    times: float
    losses: Mapping[str, float]

    @property
    def agrees(self) -> bool:
        return abs(self.losses[SHARED] / self.losses[APART] - 1) < LOSS_TOLERANCE

    def median_s(self, side: str) -> float:
        return statistics.median(self.seconds[side])


@dataclass(slots=True)
class _Side:
    engine: Engine
    task: Task
    tokens: list[int]
    rows: list[int]
    loss: float = 0.0

    def step(self, index: int) -> None:
        """One round, and the bare backbone's where it is asked first."""
        assert self.task.step == index, "steps run in order, each once"
        participant = self.task.participant()
        referred = self.engine.refer([participant])
        record = self.engine.execute(self.engine.schedule([participant]))
        (self.loss,) = [action.step.loss for action in record.actions if action.step is not None]
        self.tokens.append(record.tokens)
        self.rows.append(record.rows + (referred.rows if referred is not None else 0))


def prefix_costs(backbone: Backbone, kind: str, rounds: int, *, warmup: int = 1) -> PrefixCosts:
    """`kind`: of EXAMPLES."""
    examples = EXAMPLES[kind]
    data = Sequences(made(kind, (rounds + warmup) * examples, backbone.vocabulary))
    sides = {name: _side(backbone, kind, data, examples, share=name == SHARED) for name in (SHARED, APART)}
    timings = interleave({name: side.step for name, side in sides.items()}, rounds, warmup=warmup)
    return PrefixCosts(
        kind,
        statistics.mean(sides[APART].tokens),
        {name: statistics.mean(side.rows) for name, side in sides.items()},
        {name: timing.seconds for name, timing in timings.items()},
        ratio(timings[APART], timings[SHARED]),
        {name: side.loss for name, side in sides.items()},
    )


def made(kind: str, examples: int, vocabulary: int) -> tuple[TokenSequence, ...]:
    """The sequences of so many examples."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocabulary, HEAD, np.int32)
    found: list[TokenSequence] = []
    for _ in range(examples):
        head = common if kind == "chat" else rng.integers(0, vocabulary, HEAD, np.int32)
        for _ in range(2 if kind == "pairs" else 1):
            rest = rng.integers(0, vocabulary, rng.integers(REST // 2, REST + REST // 2 + 1), np.int32)
            ids = np.concatenate([head, rest])
            trained = len(rest) if kind == "pairs" else TRAINED
            found.append(TokenSequence(len(found), ids, np.arange(len(ids)) >= len(ids) - trained))
    return tuple(found)


def _side(backbone: Backbone, kind: str, data: Sequences, examples: int, *, share: bool) -> _Side:
    """An engine of its own: nothing that the bare backbone said is known to both."""
    job = JobSpec(
        name=kind,
        method="dpo" if kind == "pairs" else "sft",
        datasets=["none.jsonl"],
        max_steps=len(data.train),
        per_device_train_batch_size=examples,
        shuffle=False,
        share_prefixes=share,
    )
    engine = Engine(backbone)
    return _Side(engine, engine.attach(job, data), [], [])
