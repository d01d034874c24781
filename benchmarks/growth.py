"""How cost grows: with tokens, with tasks, with steps - and what of a step is no training at all.

*Tokens*: one task of 128-token examples, 512 to 4,096 tokens a round; a line through the medians, and how far they lie
from it. *Tasks*: 2,048 tokens a round, of one task or of many. *Attach*: what it takes to attach a rank-8 LoRA task on
all linears, where none, 7 and 31 are attached already, and one that brings a data set. *Overhead*: see `overhead`.
*Memory*: of a process by the number of its tasks, each stepped once by itself, so that activations are the same; what a
task adds, over the bytes of its adapter, gradient and two moments. *Steady*: see `steady`.

Sides are interleaved; targets are stored here, and what misses one is said.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.baselines import Recipe
from benchmarks.loads import Load, light
from benchmarks.memory import Memory, measure
from benchmarks.overhead import Overhead, overheads
from benchmarks.sides import EngineSide, engine_side, job_of
from benchmarks.steady import STEPS, Steady, steady
from benchmarks.timing import Step, Timings, interleave, ratio
from muxtune.engine.engine import Engine
from muxtune.engine.load import load_backbone
from muxtune.engine.planning import Planning
from muxtune.engine.task import Sequences
from muxtune.models.backbone import Backbone
from muxtune.models.sources import resolve
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable

TOKENS = (512, 1024, 2048, 4096)
EXAMPLE_TOKENS = 128
SHARED_TOKENS = 2048
TASKS = (1, 8, 32)
SHARED_EXAMPLE_TOKENS = 64  # so that 32 tasks have one each
ATTACHED = (1, 8, 32)
DATA_SET = 1000  # examples
ATTACH_REPEATS = 3
ALONE = "benchmarks.growth:tasks_alone"
Table = Callable[[], OperatorTable]

LINEAR_WITHIN = 0.10
FLAT_WITHIN = 0.15
ATTACH_S = 0.05
OVERHEAD = 0.03
MEMORY_TIMES = 1.5


@dataclass(frozen=True, slots=True)
class TokenCost:
    """A round of so many tokens, and what the line through all says of it."""

    tokens: int
    step_s: float
    line_s: float


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The same tokens a round of so many tasks together; `times_one`: over those of one task (paired, median)."""

    tasks: int
    step_s: float
    times_one: float


@dataclass(frozen=True, slots=True)
class AttachCost:
    """Attaching the last of so many tasks, each with so many examples."""

    attached: int
    examples: int
    attach_s: float


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """Of one process with so many tasks."""

    tasks: int
    memory: Memory


@dataclass(frozen=True, slots=True)
class GrowthCosts:
    """`state_bytes`: of one task's adapter, gradient and moments."""

    tokens: tuple[TokenCost, ...]
    tasks: tuple[TaskCost, ...]
    attach: tuple[AttachCost, ...]
    overheads: tuple[Overhead, ...]
    memory: tuple[TaskMemory, ...]
    state_bytes: int
    steady: Steady

    @property
    def nonlinear(self) -> float:
        """The largest relative distance from the line."""
        return max(abs(one.step_s / one.line_s - 1) for one in self.tokens)

    @property
    def added(self) -> float:
        """PSS that a task adds, over its state."""
        least, most = self.memory[0], self.memory[-1]
        added = (most.memory.pss_bytes - least.memory.pss_bytes) / (most.tasks - least.tasks)
        return added / self.state_bytes

    @property
    def missed(self) -> tuple[str, ...]:
        """Targets that are not reached, in words."""
        found = {
            f"not linear in tokens within {LINEAR_WITHIN:.0%}": self.nonlinear > LINEAR_WITHIN,
            f"not flat in tasks within {FLAT_WITHIN:.0%}": self.tasks[-1].times_one > 1 + FLAT_WITHIN,
            f"attaching takes more than {1000 * ATTACH_S:.0f} ms": any(one.attach_s > ATTACH_S for one in self.attach),
            f"overhead above {OVERHEAD:.0%}": any(one.together > OVERHEAD for one in self.overheads),
            f"a task adds more than {MEMORY_TIMES} times its state": self.added > MEMORY_TIMES,
            "memory grows with steps": not self.steady.flat,
        }
        return tuple(told for told, missed in found.items() if missed)


def growth_costs(backbone: Backbone, folder: Path, table: Table, *, rounds: int, steps: int = STEPS) -> GrowthCosts:
    """All of it. `folder`: the model that `backbone` has loaded."""
    return GrowthCosts(
        by_tokens(backbone, rounds),
        by_tasks(backbone, table, rounds),
        tuple(attaching(backbone)),
        overheads(backbone, table, rounds=2 * rounds),
        tuple(TaskMemory(tasks, measure(ALONE, folder, tasks=tasks)) for tasks in TASKS),
        job_of("any", Recipe()).peft.state_bytes(backbone.places),
        steady(steps),
    )


def by_tokens(backbone: Backbone, rounds: int, counts: Sequence[int] = TOKENS) -> tuple[TokenCost, ...]:
    """One task. The line has the least squares of relative errors."""
    timings = _timed(
        {str(tokens): _side(backbone, rounds, 1, EXAMPLE_TOKENS, tokens // EXAMPLE_TOKENS) for tokens in counts}, rounds
    )
    seconds = [timings[str(tokens)].median_s for tokens in counts]
    weights = 1 / np.array(seconds)
    factors = np.stack([np.ones(len(counts)), np.array(counts)], axis=1) * weights[:, None]
    base_s, token_s = np.linalg.lstsq(factors, np.ones(len(counts)))[0]
    return tuple(
        TokenCost(tokens, step_s, float(base_s + token_s * tokens))
        for tokens, step_s in zip(counts, seconds, strict=True)
    )


def by_tasks(backbone: Backbone, table: Table, rounds: int, counts: Sequence[int] = TASKS) -> tuple[TaskCost, ...]:
    """The tokens of a round shared among one task, and more."""
    examples = SHARED_TOKENS // SHARED_EXAMPLE_TOKENS
    sides = {
        str(tasks): _side(backbone, rounds, tasks, SHARED_EXAMPLE_TOKENS, examples // tasks, table) for tasks in counts
    }
    timings = _timed(sides, rounds)
    one = timings[str(counts[0])]
    return tuple(TaskCost(tasks, timings[str(tasks)].median_s, ratio(timings[str(tasks)], one)) for tasks in counts)


def attaching(backbone: Backbone, counts: Sequence[int] = ATTACHED) -> Iterator[AttachCost]:
    """Medians of some engines, whose memory is new to them."""
    small = light(1, vocab=backbone.vocabulary, tasks=1)
    large = light(1, vocab=backbone.vocabulary, tasks=1, tokens=EXAMPLE_TOKENS, micro_batch=DATA_SET)
    seconds = [_attach_all(backbone, [small] * max(counts) + [large]) for _ in range(ATTACH_REPEATS)]
    for count in counts:
        yield AttachCost(count, 1, statistics.median(one[count - 1] for one in seconds))
    yield AttachCost(max(counts) + 1, DATA_SET, statistics.median(one[-1] for one in seconds))


def _attach_all(backbone: Backbone, loads: Sequence[Load]) -> list[float]:
    engine, seconds = Engine(backbone), []
    for number, load in enumerate(loads):
        (batch,) = load.tasks[0]
        job, data = job_of(f"task{number}", Recipe(), micro_batch=len(batch)), Sequences(batch)
        began = time.perf_counter()
        engine.attach(job, data)
        seconds.append(time.perf_counter() - began)
    return seconds


def tasks_alone(folder: Path, tasks: int) -> EngineSide:
    """The contender of the memory measurement: one process, each task stepped once, by itself."""
    backbone = load_backbone(resolve(str(folder)), device="cpu", dtype="fp32")
    load = light(1, vocab=backbone.vocabulary, tasks=tasks)
    side = engine_side(backbone, load, Recipe(), policy="sequential")
    side.step(0)
    return side


def _side(
    backbone: Backbone, rounds: int, tasks: int, tokens: int, micro_batch: int, table: Table | None = None
) -> EngineSide:
    load = light(rounds + 1, vocab=backbone.vocabulary, tasks=tasks, tokens=tokens, micro_batch=micro_batch)
    if table is None:
        return engine_side(backbone, load, Recipe())
    planning = Planning(table, MemoryModel(), backbone.places)
    return engine_side(backbone, load, Recipe(), policy="muxtune", planning=planning)


def _timed(sides: dict[str, EngineSide], rounds: int) -> dict[str, Timings]:
    steps: dict[str, Step] = {name: side.step for name, side in sides.items()}
    return interleave(steps, rounds)
