"""What packing saves, and what the executor itself costs: three figures of our own engine against itself.

    python -m benchmarks.chunks [--rounds N] [--layers N] [--threads N] [--model NAME]

*Rows*: the load of eight tasks with the lengths of real data sets (`loads.non_uniform`), several steps of it, as
integers: what part of the rows that the backbone would run is no token, under each policy and where every example is
padded to 64, 128 or 256 as its data set is in the literature. *Time*: the same step packed, padded and one task after
another, interleaved. *Overhead*: of a step of eight tasks of 64 tokens, the time that is spent neither in the backbone,
the head and their backward pass nor in the optimizers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import Recipe
from benchmarks.loads import NON_UNIFORM, Load, light, non_uniform
from benchmarks.sides import EngineSide, engine_side
from benchmarks.timing import Timings, interleave, ratio
from muxtune.engine import executor
from muxtune.engine.load import load_backbone
from muxtune.engine.optim import FlatAdamW
from muxtune.models.backbone import Backbone
from muxtune.models.sources import resolve
from muxtune.plan.types import MicroBatch, Policy

MODEL = "smollm2-135m-instruct"
POLICIES: tuple[Policy, ...] = ("fuse-all", "sequential", "padded")
PADDED_TO = {"sst2": 64, "openbookqa": 128, "rte": 256}
ROW_MULTIPLE = 16
ROUNDS = 5
LAYERS = 4


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


def times(backbone: Backbone, rounds: int) -> dict[Policy, Timings]:
    """A step of the load under each policy, interleaved."""
    load = non_uniform(rounds + 1, vocab=backbone.vocabulary)
    sides: dict[Policy, EngineSide] = {
        policy: engine_side(backbone, load, Recipe(), policy=policy) for policy in POLICIES
    }
    found = interleave({policy: side.step for policy, side in sides.items()}, rounds)
    return {policy: found[policy] for policy in POLICIES}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunks", description="See benchmarks/chunks.py.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    backbone = load_backbone(resolve(options.model), device="cpu", dtype="fp32", num_hidden_layers=options.layers)
    measured = times(backbone, options.rounds)
    load = non_uniform(16, vocab=backbone.vocabulary)
    table = Table("policy", "rows that are no token", "step s", "x packed")
    for policy, timing in measured.items():
        wasted = ineffective(backbone, load, policy)
        against = ratio(timing, measured["fuse-all"])
        table.add_row(policy, f"{wasted:.1%}", f"{timing.median_s:.2f}", f"{against:.2f}")
    table.add_row("padded to 64 / 128 / 256", f"{padded_as_published(load):.1%}", "", "")
    console = Console()
    console.print(table)
    console.print(
        f"the executor's own share of a step of 8 tasks of 64 tokens: {overhead(backbone, options.rounds):.1%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
