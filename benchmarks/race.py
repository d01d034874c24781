"""One load, all sides, interleaved: seconds, tokens per second, ratios, and the proof that all trained the same.

Four sides train: ours fused and ours task by task (`sides`), transformers + peft task by task with the same fused AdamW
and - on the light load, where it shows - with torch's default one, as most would write it (`baselines`). Two more do
only what cannot be left out (`floor`), in the passes of the one and of the other of ours: the roofline. All start from
the same matrices and see the same sequences, so their losses in the last round must agree; where they do not, the
figures compare different work and are worth nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from benchmarks.baselines import Recipe, Side, initial_matrices, task_by_task
from benchmarks.floor import floor_side
from benchmarks.loads import Load
from benchmarks.sides import engine_side
from benchmarks.timing import Step, Timings, interleave, ratio
from muxtune.models.backbone import Backbone

FUSED = "muxtune, tasks fused"
ALONE = "muxtune, task by task"
PEFT = "transformers + peft, task by task"
PEFT_DEFAULT = "transformers + peft, default AdamW"
FLOOR_FUSED = "floor, tasks fused"
FLOOR_ALONE = "floor, task by task"
FLOORS = {FUSED: FLOOR_FUSED, ALONE: FLOOR_ALONE}
AGAINST_PEFT = "muxtune against transformers + peft"
ROOFLINE = "share of the roofline, fused"

# Relative difference of losses in the last round. Six steps move the loss by 0.3-3 %, so one step missed would show.
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-3}


@dataclass(frozen=True, slots=True)
class SideResult:
    """`losses`: each task's in the last round; empty for a floor."""

    seconds: tuple[float, ...]
    median_s: float
    spread: float
    tokens_per_s: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RaceResult:
    """`ratios` are medians over rounds; `loss_gap` the largest relative difference of two sides' last losses."""

    load: str
    tokens: tuple[int, ...]  # real tokens of all tasks in each counted round
    trained_tokens: tuple[int, ...]
    padding: float  # tokens of peft's padded batches over real ones
    sides: Mapping[str, SideResult]
    ratios: Mapping[str, float]
    loss_gap: float
    loss_tolerance: float

    @property
    def agrees(self) -> bool:
        """False, too, where a loss is not a number."""
        return self.loss_gap <= self.loss_tolerance


def race(
    load: Load,
    backbone: Backbone,
    model: PreTrainedModel,
    recipe: Recipe,
    *,
    warmup: int = 1,
    default_optimizer: bool = False,
    one_by_one: bool = True,
) -> RaceResult:
    """Run every step of the load on every side, the first `warmup` uncounted. `model` is the backbone's twin, plain.

    Without `one_by_one` our tasks run fused only, and so does their floor.
    """
    init = initial_matrices(model, recipe)
    ours = {FUSED: engine_side(backbone, load, recipe, init)}
    if one_by_one:
        ours[ALONE] = engine_side(backbone, load, recipe, init, policy="sequential")
    trainers: dict[str, Side] = {**ours, PEFT: task_by_task(model, load, replace(recipe, optimizer="fused"), init)}
    if default_optimizer:
        trainers[PEFT_DEFAULT] = task_by_task(model, load, replace(recipe, optimizer="default"), init)
    steps: dict[str, Step] = {name: side.step for name, side in trainers.items()}
    steps |= {FLOORS[name]: floor_side(side, load, model, r=recipe.r).step for name, side in ours.items()}
    timings = interleave(steps, load.steps - warmup, warmup=warmup)
    counted = range(warmup, load.steps)
    tokens = tuple(load.real_tokens(step) for step in counted)
    last = {name: tuple(losses[-1] for losses in side.losses) for name, side in trainers.items()}
    return RaceResult(
        load.name,
        tokens,
        tuple(load.trained_tokens(step) for step in counted),
        load.padding(),
        {name: _side(timing, tokens, last.get(name, ())) for name, timing in timings.items()},
        _ratios(timings),
        loss_gap(list(last.values())),
        LOSS_TOLERANCE[backbone.dtype],
    )


def loss_gap(sides: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between any side's loss of a task and the first side's; infinite for NaN."""
    gaps = [abs(own - first) / abs(first) for side in sides[1:] for own, first in zip(side, sides[0], strict=True)]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)


def _side(timing: Timings, tokens: Sequence[int], losses: tuple[float, ...]) -> SideResult:
    speed = statistics.median(count / taken for count, taken in zip(tokens, timing.seconds, strict=True))
    return SideResult(timing.seconds, timing.median_s, timing.spread, speed, losses)


def _ratios(timings: Mapping[str, Timings]) -> dict[str, float]:
    """What the reader wants to know, each as a median over rounds."""
    named = {
        AGAINST_PEFT: (PEFT, FUSED),
        "of which work not done": (PEFT, ALONE),
        "of which fusing": (ALONE, FUSED),
        ROOFLINE: (FLOOR_FUSED, FUSED),
        "share of the roofline, task by task": (FLOOR_ALONE, ALONE),
        "what fusing can give at most": (FLOOR_ALONE, FLOOR_FUSED),
        "muxtune against transformers + peft with default AdamW": (PEFT_DEFAULT, FUSED),
    }
    return {
        name: ratio(timings[slow], timings[fast])
        for name, (slow, fast) in named.items()
        if slow in timings and fast in timings
    }
