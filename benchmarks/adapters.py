"""What adapters cost a step, beside the backbone they share: by type, by number, by rank; grouped and one by one.

Three tables, all on the first `LAYERS` layers of the model (the cost of an adapter is per layer) with one example of
`TOKENS` tokens a task and step, fp32, AdamW included, sides interleaved:

*by type*: the step of K tasks beside the backbone's own, which is the same rows in one task that trains the first norm
and nothing else: forward, head, and backward down to the first layer. *by rank*: K LoRA tasks with their modules
grouped (`muxtune.peft.grouped`) and one by one. *mixed*: one task of each type in one pass, and the same tasks one
after another. Each figure is a median of rounds; a share is the median of the rounds' own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.loads import Load, light
from benchmarks.timing import Step, Timings, interleave, ratio
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.peft import grouped
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import LnTuning, Lora, PeftBase, read_peft

LAYERS = 4
TOKENS = 16
COUNTS = (1, 2, 4, 8, 16, 32)
RANKS = (4, 8, 16, 32, 64)
RANK_COUNTS = (4, 16)
PISSA_MOST = 4  # whose start takes a decomposition of each weight
TYPES = (
    "lora", "dora", "pissa", "ia3", "bitfit", "ln_tuning", "shira", "houlsby", "pfeiffer", "parallel",
    "prefix_tuning", "prompt_tuning",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TypeCost:
    """Milliseconds of a step of `count` tasks; `own_ms` of the backbone on the same rows."""

    peft_type: str
    count: int
    step_ms: float
    own_ms: float
    share: float  # what the adapters add, over the backbone's own


@dataclass(frozen=True, slots=True)
class RankCost:
    """What `count` LoRA adapters add to a step, over the backbone's own, and the whole step one by one over grouped."""

    rank: int
    count: int
    grouped_share: float
    one_by_one_share: float
    speedup: float


@dataclass(frozen=True, slots=True)
class MixedCost:
    """One task of each type."""

    types: tuple[str, ...]
    together_ms: float
    in_turn_ms: float
    speedup: float


@dataclass(frozen=True, slots=True)
class AdapterCosts:
    by_type: tuple[TypeCost, ...]
    by_rank: tuple[RankCost, ...]
    mixed: MixedCost


def adapter_costs(
    backbone: Backbone,
    *,
    rounds: int = 5,
    counts: Sequence[int] = COUNTS,
    types: Sequence[str] = TYPES,
    ranks: Sequence[int] = RANKS,
    rank_counts: Sequence[int] = RANK_COUNTS,
) -> AdapterCosts:
    """All three tables."""
    engines = _Engines.on(backbone)
    return AdapterCosts(
        tuple(_by_type(engines, counts, types, rounds)),
        tuple(_by_rank(engines, rank_counts, ranks, rounds)),
        _mixed(engines, types, rounds),
    )


def _by_type(engines: _Engines, counts: Sequence[int], types: Sequence[str], rounds: int) -> Iterator[TypeCost]:
    for count in counts:
        load = light(1, vocab=engines.fused.backbone.vocabulary, tasks=count, tokens=TOKENS)
        present = [name for name in types if name != "pissa" or count <= PISSA_MOST]
        sides = {name: _side(engines.fused, load, [read_peft(name)] * count) for name in present}
        timings = _timed(sides | {_OWN: _own(engines.fused, load)}, rounds)
        own = timings[_OWN]
        for name in present:
            yield TypeCost(name, count, _ms(timings[name]), _ms(own), _share(timings[name], own))


def _by_rank(engines: _Engines, counts: Sequence[int], ranks: Sequence[int], rounds: int) -> Iterator[RankCost]:
    for count in counts:
        load = light(1, vocab=engines.fused.backbone.vocabulary, tasks=count, tokens=TOKENS)
        for rank in ranks:
            specs = [Lora(r=rank)] * count
            sides = {
                "grouped": _side(engines.grouped, load, specs),
                "one by one": _side(engines.one_by_one, load, specs),
                _OWN: _own(engines.fused, load),
            }
            timings = _timed(sides, rounds)
            together, apart, own = timings["grouped"], timings["one by one"], timings[_OWN]
            yield RankCost(rank, count, _share(together, own), _share(apart, own), ratio(apart, together))


def _mixed(engines: _Engines, types: Sequence[str], rounds: int) -> MixedCost:
    load = light(1, vocab=engines.fused.backbone.vocabulary, tasks=len(types), tokens=TOKENS)
    specs = [read_peft(name) for name in types]
    sides = {
        "together": _side(engines.fused, load, specs),
        "in turn": _side(engines.in_turn, load, specs),
    }
    timings = _timed(sides, rounds)
    together, in_turn = timings["together"], timings["in turn"]
    return MixedCost(tuple(types), _ms(together), _ms(in_turn), ratio(in_turn, together))


_OWN = "the backbone's own"


@dataclass(frozen=True, slots=True)
class _Side:
    """Tasks of an engine of their own, whose one batch is trained on again and again."""

    engine: Engine
    tasks: tuple[Task, ...]

    def step(self, index: int) -> None:
        schedule = self.engine.schedule([task.participant() for task in self.tasks])
        for action in self.engine.execute(schedule).actions:
            assert action.step is None or action.step.error is None, action.step


@dataclass(frozen=True, slots=True)
class _Engines:
    """One of each kind for all sides: making one probes the backbone for a second."""

    fused: Engine
    in_turn: Engine
    grouped: Engine
    one_by_one: Engine

    @classmethod
    def on(cls, backbone: Backbone) -> _Engines:
        return cls(
            Engine(backbone),
            Engine(backbone, policy="sequential"),
            Engine(backbone, grouping=grouped.always),
            Engine(backbone, grouping=grouped.never),
        )


def _side(engine: Engine, load: Load, specs: Sequence[PeftBase]) -> _Side:
    before = len(engine.tasks)
    tasks = [
        engine.attach(_job(f"task{before + number}", spec), Sequences(batches[0]))
        for number, (spec, batches) in enumerate(zip(specs, load.tasks, strict=True))
    ]
    return _Side(engine, tuple(tasks))


def _own(engine: Engine, load: Load) -> _Side:
    """All rows as sequences of one task that trains the first norm: forward, head and backward of the whole chain."""
    first = next(name for name, op in engine.backbone.ops.items() if op.kind == "norm")
    sequences = [replace(batches[0][0], index=number) for number, batches in enumerate(load.tasks)]
    spec = LnTuning(target_modules=(first.removeprefix("model."),))
    task = engine.attach(_job("own", spec, batch=len(sequences)), Sequences(sequences))
    return _Side(engine, (task,))


def _job(name: str, spec: PeftBase, *, batch: int = 1) -> JobSpec:
    """A job that never ends within the measurement. Sequences come ready-made: the data set it names is never read."""
    return JobSpec(
        name=name,
        datasets=("sequences.jsonl",),
        peft=spec,
        max_steps=10_000,
        per_device_train_batch_size=batch,
        shuffle=False,
    )


def _timed(sides: Mapping[str, _Side], rounds: int) -> dict[str, Timings]:
    steps: dict[str, Step] = {name: side.step for name, side in sides.items()}
    timings = interleave(steps, rounds, warmup=1)
    for side in sides.values():
        for task in side.tasks:
            side.engine.detach(task)
    return timings


def _ms(timing: Timings) -> float:
    return 1e3 * timing.median_s


def _share(whole: Timings, own: Timings) -> float:
    return statistics.median(a / b for a, b in zip(whole.seconds, own.seconds, strict=True)) - 1
