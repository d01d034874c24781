"""The four policies side by side: the same tasks, the same steps, only who runs with whom differs.

Loads: *light* (a micro-batch of one example) and *heavy* (of four), *uniform* (all tasks of one length or data set) and
*non-uniform* (three data sets, in an order drawn by seed, as tasks arrive in any order), of 8, 16 or 32 tasks. Each
round runs step r of every side, in turning order; ratios are paired, and given with the interval that holds their
median with at least 95 % (order statistics). `padded in one batch` is `padded` without a bound on the rows of a pass,
every task padded to the longest of all: what SL-PEFT and mLoRA do. transformers + peft runs task by task.

Beside the times: what the planner took, what it predicted, what part of the rows was no token. The ablations of the
paper are among the sides: without fusion is `sequential`, without alignment `padded`; on one device there is no
communication to orchestrate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from benchmarks.baselines import Recipe, initial_matrices, task_by_task
from benchmarks.loads import NON_UNIFORM, Load, light, non_uniform, uniform
from benchmarks.sides import EngineSide, engine_side
from benchmarks.timing import Step, Timings, interleave
from muxtune.engine.planning import Planning
from muxtune.models.backbone import Backbone
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable
from muxtune.plan.types import MicroBatch, RoundSchedule
from muxtune.spec.policy import Policy

POLICIES: tuple[Policy, ...] = ("muxtune", "fuse-all", "sequential", "padded")
ONE_BATCH = "padded, in one batch"
PEFT = "transformers + peft, task by task"
KINDS = ("light uniform", "light non-uniform", "heavy uniform", "heavy non-uniform")
TASKS = (8, 16, 32)
LAYERS = 6  # of the whole model's, so that an evening is enough
ROW_MULTIPLE = 16
UNBOUNDED = 10**9
ONE_BATCH_TOKENS = 4000  # of a step, above which a batch of all tasks takes too much memory


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One side of one load. `slower` is its time over muxtune's: median and interval of the paired ratios."""

    side: str
    median_s: float
    tokens_per_s: float
    slower: float
    interval: tuple[float, float]
    ineffective: float | None


@dataclass(frozen=True, slots=True)
class PolicyRace:
    """All sides of one load. `predicted_s` and `planned_s` are muxtune's."""

    load: str
    tasks: int
    tokens: float  # a step
    sides: tuple[PolicyResult, ...]
    htasks: int
    predicted_s: float
    planned_s: float

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted_s / next(side.median_s for side in self.sides if side.side == "muxtune") - 1


def load_of_kind(kind: str, tasks: int, steps: int, *, vocab: int) -> Load:
    """`kind` is one of `KINDS`."""
    names = _arrivals(tasks)
    if kind == "light uniform":
        return light(steps, vocab=vocab, tasks=tasks)
    micro_batch = 1 if kind.startswith("light") else 4
    if kind == "heavy uniform":
        return uniform(steps, vocab=vocab, tasks=tasks, micro_batch=micro_batch)
    return non_uniform(steps, vocab=vocab, micro_batch=micro_batch, names=names)


def _arrivals(tasks: int) -> tuple[str, ...]:
    """Data sets in the mix of the literature, in an order that a seed draws."""
    names = [NON_UNIFORM[place % len(NON_UNIFORM)] for place in range(tasks)]
    return tuple(names[place] for place in np.random.default_rng(7).permutation(tasks))


def policy_race(
    kind: str,
    tasks: int,
    backbone: Backbone,
    model: PreTrainedModel | None,
    table: Callable[[], OperatorTable],
    *,
    rounds: int,
) -> PolicyRace:
    """Race the policies - and transformers + peft, where its `model` is given - on one load."""
    load, recipe = load_of_kind(kind, tasks, rounds + 1, vocab=backbone.vocabulary), Recipe()
    ours: dict[str, EngineSide] = {policy: _side(backbone, load, recipe, policy, table) for policy in POLICIES}
    if load.real_tokens(0) <= ONE_BATCH_TOKENS:
        ours[ONE_BATCH] = engine_side(backbone, load, recipe, policy="padded", fuse_tokens=UNBOUNDED)
    steps: dict[str, Step] = {name: side.step for name, side in ours.items()}
    if model is not None:
        steps[PEFT] = task_by_task(model, load, recipe, initial_matrices(model, recipe)).step
    wasted = {name: ineffective(side, load) for name, side in ours.items()}
    timings = interleave(steps, rounds)
    tokens = [load.real_tokens(step) for step in range(1, rounds + 1)]
    planning = ours["muxtune"].engine.planning
    assert planning is not None and planning.plan is not None
    return PolicyRace(
        kind,
        tasks,
        statistics.mean(tokens),
        tuple(_result(name, timing, timings["muxtune"], tokens, wasted.get(name)) for name, timing in timings.items()),
        len(planning.plan.htasks),
        planning.plan.iteration_s,
        planning.planned_s,
    )


def _side(
    backbone: Backbone, load: Load, recipe: Recipe, policy: Policy, table: Callable[[], OperatorTable]
) -> EngineSide:
    planning = Planning(table, MemoryModel(), backbone.places) if policy == "muxtune" else None
    return engine_side(backbone, load, recipe, policy=policy, planning=planning)


def ineffective(side: EngineSide, load: Load) -> float:
    """The part of all rows of all steps that is no token. Nothing is run."""
    rows = tokens = 0
    for step in range(load.steps):
        for task in side.tasks:
            task.step = step
        schedule = side.engine.schedule([task.participant() for task in side.tasks])
        rows += _rows(schedule)
        tokens += sum(action.tokens for action in schedule.actions if isinstance(action, MicroBatch))
    for task in side.tasks:
        task.step = 0
    return 1 - tokens / rows


def _rows(schedule: RoundSchedule) -> int:
    found = 0
    for action in schedule.actions:
        if isinstance(action, MicroBatch):
            rows = sum(max(ref.length, action.width) for item in action.items for ref in item.sequences)
            found += rows + -rows % ROW_MULTIPLE
    return found


def _result(name: str, timing: Timings, fastest: Timings, tokens: Sequence[int], wasted: float | None) -> PolicyResult:
    ratios = [own / other for own, other in zip(timing.seconds, fastest.seconds, strict=True)]
    speed = statistics.median(count / taken for count, taken in zip(tokens, timing.seconds, strict=True))
    return PolicyResult(name, timing.median_s, speed, statistics.median(ratios), median_interval(ratios), wasted)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics between which the median lies with at least that confidence, whatever the distribution; the
    extremes where there are too few values for it."""
    ordered, count = sorted(values), len(values)
    outside = 0.0
    below = 0
    while below < count // 2:
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - confidence:
            break
        below += 1
    at = max(0, below - 1)
    return ordered[at], ordered[count - 1 - at]
