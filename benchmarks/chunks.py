"""What packing saves, and what the executor itself costs: three figures of our own engine against itself.

*Rows*: the load of eight tasks with the lengths of real data sets (`loads.non_uniform`), several steps of it, as
integers: what part of the rows that the backbone would run is no token, under each policy and where every example is
padded to 64, 128 or 256 as its data set is in the literature. *Time*: the same step packed, padded and one task after
another, interleaved. *Overhead*: of a step of eight tasks of 64 tokens, the time that is spent neither in the backbone,
the head and their backward pass nor in the optimizers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.baselines import Recipe
from benchmarks.loads import NON_UNIFORM, Load, light, non_uniform
from benchmarks.sides import EngineSide, engine_side
from benchmarks.timing import Timings, interleave, ratio
from muxtune.engine import executor
from muxtune.engine.optim import FlatAdamW
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch
from muxtune.spec.policy import Policy

POLICIES: tuple[Policy, ...] = ("fuse-all", "sequential", "padded")
PADDED_TO = {"sst2": 64, "openbookqa": 128, "rte": 256}
ROW_MULTIPLE = 16
LAYERS = 4
COUNTED_STEPS = 16  # whose rows are counted


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """A step of the load under one policy; `wasted` is the part of its rows that is no token."""

    policy: Policy
    wasted: float
    seconds: tuple[float, ...]
    times_packed: float


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """The first policy is the packed one. `wasted_as_published`: padded as the data sets are in the literature."""

    policies: tuple[PolicyCost, ...]
    wasted_as_published: float
    overhead: float


def chunk_costs(backbone: Backbone, rounds: int, load: Load | None = None) -> ChunkCosts:
    """All three figures; `load` has a step more than there are rounds, at least."""
    load = load or non_uniform(max(COUNTED_STEPS, rounds + 1), vocab=backbone.vocabulary)
    measured = times(backbone, load, rounds)
    packed = measured[POLICIES[0]]
    policies = tuple(
        PolicyCost(policy, ineffective(backbone, load, policy), timing.seconds, ratio(timing, packed))
        for policy, timing in measured.items()
    )
    return ChunkCosts(policies, padded_as_published(load), overhead(backbone, rounds))


def ineffective(backbone: Backbone, load: Load, policy: Policy) -> float:
    """The part of all rows of all steps that is no token. Nothing is run."""
    side = engine_side(backbone, load, Recipe(), policy=policy)
    rows = tokens = 0
    for step in range(load.steps):
        for task in side.tasks:
            task.step = step
        for action in side.engine.schedule([task.participant() for task in side.tasks]).actions:
            if isinstance(action, MicroBatch):
                lengths = [max(ref.length, action.width) for item in action.items for ref in item.sequences]
                rows += sum(lengths) + -sum(lengths) % ROW_MULTIPLE
                tokens += action.tokens
    return 1 - tokens / rows


def padded_as_published(load: Load) -> float:
    """The same where each task pads, or cuts, its examples to the length that its data set is given."""
    rows = tokens = 0
    for name, batches in zip(NON_UNIFORM, load.tasks, strict=True):
        for sequence in (sequence for batch in batches for sequence in batch):
            rows += PADDED_TO[name]
            tokens += min(len(sequence), PADDED_TO[name])
    return 1 - tokens / rows


def overhead(backbone: Backbone, rounds: int) -> float:
    """Median share of a step's time outside of backbone, head, backward pass and optimizers."""
    load = light(rounds + 1, vocab=backbone.vocabulary, tokens=64)
    side = engine_side(backbone, load, Recipe())
    shares = []
    for step in range(rounds + 1):
        with _timed_inside(backbone) as inside:
            began = time.perf_counter()
            side.step(step)
            whole_s = time.perf_counter() - began
        shares.append(1 - sum(inside) / whole_s)
    return sorted(shares[1:])[rounds // 2]


@contextmanager
def _timed_inside(backbone: Backbone) -> Iterator[list[float]]:
    """Seconds of each call of what counts as work, while the block lasts."""
    seconds: list[float] = []
    places: list[tuple[Any, str]] = [
        (backbone, "hidden"),
        (executor, "token_losses"),
        (torch.autograd, "backward"),
        (FlatAdamW, "step"),
        (FlatAdamW, "gradient_norm"),
    ]
    kept = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, kept, strict=True):
        setattr(owner, name, _timing(function, seconds))
    try:
        yield seconds
    finally:
        for (owner, name), function in zip(places, kept, strict=True):
            setattr(owner, name, function)


def _timing(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - began)

    return timed


def times(backbone: Backbone, load: Load, rounds: int) -> dict[Policy, Timings]:
    """A step of the load under each policy, interleaved."""
    sides: dict[Policy, EngineSide] = {
        policy: engine_side(backbone, load, Recipe(), policy=policy) for policy in POLICIES
    }
    found = interleave({policy: side.step for policy, side in sides.items()}, rounds)
    return {policy: found[policy] for policy in POLICIES}
