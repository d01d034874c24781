"""`make bench`: tokens per second and memory on SmolLM2-135M, completion-only loss, against transformers + peft.

    python -m benchmarks.bench [--part light] [--part medium] [--part non-uniform] [--part memory] [--part adapters]
                               [--part chunks] [--part long] [--part planning] [--part policies]
                               [--part prediction] [--part choices] [--part growth] [--part prefix]
                               [--tokens N] [--chunk N] [--tasks N] [--mixes N] [--seed N] [--steps N]
                               [--rounds N] [--threads N] [--layers N] [--model NAME]
                               [--device cpu|cuda] [--dtype fp32|bf16] [--out FILE]

*light*: 8 tasks, a micro-batch of one 16-token example each. *medium*: the same with 64 tokens. *non-uniform*: 8 tasks
with the lengths of real data sets, micro-batch 4. All print the floor beside the sides, and what share of this roofline
each reaches (`race`, `floor`). *memory*: 1, 8 and 32 tasks, each stepped once (`memory`; host memory, so on the CPU
only). *adapters*: what adapters add to a step, by type, number and rank, on the first four layers unless `--layers`
says otherwise (`adapters`). *chunks*: packed rows against padded ones, and the executor's own time, on four layers, too
(`chunks`). *long*: one example of `--tokens` in one pass and in chunks of `--chunk`, whose activations are computed
twice or kept, on ten layers (`long`; on the CPU only). *planning*: what it takes, and what it gives up (`planning`).
*policies*: four of them and transformers + peft on four kinds of load, for each of `--tasks`, on six layers
(`policies`). *prediction*: of mixes drawn after the operator table is measured, what a step takes against what was
predicted (`prediction`). *choices*: whether the policy called best for such a mix is, on six layers (`choices`).
*growth*: step time by tokens and by tasks, attaching, overhead, memory by tasks and over many steps (`growth`; on the
CPU only). *prefix*: examples that begin alike, their beginning computed once or for each (`prefix`). `--layers 2` is a
quick look that says nothing about the whole model. The JSON that `--out` writes is described in `report`. Exits 1 where
the sides' final losses disagree.

More than an hour on two quiet cores; anything else that runs meanwhile makes the figures worth less.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import adapters, chunks, long, memory, policies, prediction, prefix, steady
from benchmarks.adapters import AdapterCosts, adapter_costs
from benchmarks.baselines import Recipe
from benchmarks.choices import Choices, choices
from benchmarks.chunks import ChunkCosts, chunk_costs
from benchmarks.folders import MODEL, model_folder, plain_model
from benchmarks.growth import GrowthCosts, growth_costs
from benchmarks.loads import light, medium, non_uniform
from benchmarks.long import LongCosts, long_costs
from benchmarks.machine import describe
from benchmarks.planning import planning_costs
from benchmarks.policies import PolicyRace, policy_race
from benchmarks.prefix import PrefixCosts, prefix_costs
from benchmarks.race import RaceResult, race
from benchmarks.report import (
    Findings,
    Layout,
    show_adapters,
    show_choices,
    show_chunks,
    show_growth,
    show_long,
    show_machine,
    show_memory,
    show_planning,
    show_policies,
    show_prediction,
    show_prefix,
    show_race,
    write_json,
)
from muxtune.engine.load import choose_device, load_backbone
from muxtune.engine.profiler import measure
from muxtune.models.sources import ModelFolder

PARTS = (
    "light",
    "medium",
    "non-uniform",
    "memory",
    "adapters",
    "chunks",
    "long",
    "planning",
    "policies",
    "prediction",
    "choices",
    "growth",
    "prefix",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = "benchmarks.sides:muxtune_tasks"
MEMORY_TASKS = (1, 8, 32)
LOADS = {"light": light, "medium": medium, "non-uniform": non_uniform}
WARMUP = 1
# A light step takes a tenth of a non-uniform one and is the noisier for it.
ROUNDS = {
    "light": 11,
    "medium": 7,
    "non-uniform": 5,
    "adapters": 3,
    "chunks": 5,
    "policies": 5,
    "prediction": 5,
    "choices": 3,
    "growth": 3,
    "prefix": 5,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. `layers` and `rounds` None: the whole model, or what each part takes of it, and `ROUNDS`.
    `tokens` and `chunk` are those of the long example, `tasks` the numbers of them in the race of policies, `mixes` and
    `seed` of what is predicted, `steps` are the tiny ones of growth."""

    model: str = MODEL
    parts: tuple[str, ...] = PARTS
    rounds: int | None = None
    layers: int | None = None
    device: str = "cpu"
    dtype: str = "fp32"
    tokens: int = long.TOKENS
    chunk: int = long.CHUNK
    tasks: tuple[int, ...] = policies.TASKS
    mixes: int = prediction.MIXES
    seed: int = 0
    steps: int = steady.STEPS


def run_race(folder: ModelFolder, part: str, settings: Settings) -> RaceResult:
    """One load on both programs, each with the folder's model loaded its own way."""
    device, dtype = choose_device(settings.device), DTYPES[settings.dtype]
    backbone = load_backbone(folder, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
    model = plain_model(folder, dtype).to(device)
    steps = WARMUP + (settings.rounds or ROUNDS[part])
    load = LOADS[part](steps, vocab=backbone.vocabulary)
    return race(load, backbone, model, Recipe(), warmup=WARMUP, default_optimizer=part == "light")


def run_adapters(settings: Settings) -> AdapterCosts:
    """Of the first layers alone: what adapters cost goes with their number."""
    with model_folder(settings.model, settings.layers or adapters.LAYERS) as cut:
        backbone = load_backbone(cut, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
        return adapter_costs(backbone, rounds=settings.rounds or ROUNDS["adapters"])


def run_chunks(settings: Settings) -> ChunkCosts:
    """Of the first layers alone: who runs with whom is the same for each."""
    with model_folder(settings.model, settings.layers or chunks.LAYERS) as cut:
        backbone = load_backbone(cut, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
        return chunk_costs(backbone, settings.rounds or ROUNDS["chunks"])


def run_long(settings: Settings) -> LongCosts:
    """Of the first layers alone, so that the one pass has room."""
    with model_folder(settings.model, settings.layers or long.LAYERS) as cut:
        return long_costs(cut.path, tokens=settings.tokens, chunk=settings.chunk)


def run_policies(settings: Settings) -> Iterator[PolicyRace]:
    """Every kind of load for every number of tasks, on the first layers: the whole model would take hours."""
    rounds = settings.rounds or ROUNDS["policies"]
    with model_folder(settings.model, settings.layers or policies.LAYERS) as cut:
        backbone = load_backbone(cut, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
        model = plain_model(cut, DTYPES[settings.dtype]).to(choose_device(settings.device))
        table = measure(backbone)
        for tasks in settings.tasks:
            for kind in policies.KINDS:
                yield policy_race(kind, tasks, backbone, model, lambda: table, rounds=rounds)


def run_prediction(settings: Settings, console: Console) -> prediction.Report:
    """The table is measured once, before any mix is drawn."""
    rounds = settings.rounds or ROUNDS["prediction"]
    with model_folder(settings.model, settings.layers) as folder:
        backbone = load_backbone(folder, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
        drawn = {"mixes": settings.mixes, "seed": settings.seed, "rounds": rounds, "clock": time.perf_counter}
        told = {"tell": lambda one: console.print(prediction.line(one), highlight=False, soft_wrap=True)}
        return prediction.predictions(backbone, measure(backbone), **drawn, **told)


def run_choices(settings: Settings, console: Console) -> Choices:
    """The same mixes, each under every policy, on the first layers alone."""
    rounds = settings.rounds or ROUNDS["choices"]
    with model_folder(settings.model, settings.layers or policies.LAYERS) as folder:
        backbone = load_backbone(folder, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
        drawn = {"mixes": settings.mixes, "seed": settings.seed, "rounds": rounds, "clock": time.perf_counter}
        told = {"tell": lambda one: console.print(one.told, highlight=False, soft_wrap=True)}
        return choices(backbone, measure(backbone), **drawn, **told)


def run_growth(folder: ModelFolder, settings: Settings) -> GrowthCosts:
    """Of the whole model: what an adapter costs goes with its layers."""
    backbone = load_backbone(folder, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
    table = measure(backbone)
    rounds = settings.rounds or ROUNDS["growth"]
    return growth_costs(backbone, folder.path, lambda: table, rounds=rounds, steps=settings.steps)


def run_prefix(folder: ModelFolder, settings: Settings) -> Iterator[PrefixCosts]:
    """Every kind of data, on the whole model: the head is a part of what is not shared."""
    backbone = load_backbone(folder, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
    for kind in prefix.EXAMPLES:
        yield prefix_costs(backbone, kind, settings.rounds or ROUNDS["prefix"])


def run_memory(folder: ModelFolder) -> Iterator[Layout]:
    """One process of ours, as many of transformers + peft as there are tasks, and one with its multi-adapter API."""
    for tasks in MEMORY_TASKS:
        yield Layout(tasks, "muxtune, one process", memory.measure(OURS, folder.path, tasks=tasks))
        many = memory.measure(memory.PEFT, folder.path, tasks=1, processes=tasks)
        yield Layout(tasks, "transformers + peft, a process a task", many)
        if tasks > 1:
            switched = memory.measure(memory.PEFT, folder.path, tasks=tasks)
            yield Layout(tasks, "transformers + peft, one process, many adapters", switched)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    options = _parse(arguments)
    warnings.filterwarnings("ignore", memory.PEFT_NOISE, FutureWarning)
    settings = Settings(
        options.model,
        tuple(options.part or PARTS),
        options.rounds,
        options.layers,
        options.device,
        options.dtype,
        options.tokens,
        options.chunk,
        tuple(options.tasks or policies.TASKS),
        options.mixes,
        options.seed,
        options.steps,
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console()
    machine = describe(choose_device(settings.device))
    show_machine(console, machine)
    found = Findings()
    with model_folder(settings.model, settings.layers) as folder:
        for part in settings.parts:
            _measure(part, folder, settings, found, console)
    if options.out is not None:
        write_json(options.out, machine, asdict(settings), found)
    return 0 if found.agree else 1


def _measure(part: str, folder: ModelFolder, settings: Settings, found: Findings, console: Console) -> None:
    """One part, into `found` and onto the screen."""
    if part == "memory":
        found.memory = list(run_memory(folder))
        show_memory(console, found.memory)
    elif part == "adapters":
        found.adapters = run_adapters(settings)
        show_adapters(console, found.adapters)
    elif part == "chunks":
        found.chunks = run_chunks(settings)
        show_chunks(console, found.chunks)
    elif part == "planning":
        found.planning = planning_costs()
        show_planning(console, found.planning)
    elif part == "policies":
        for race in run_policies(settings):
            found.policies.append(race)
            show_policies(console, race)
    elif part == "prediction":
        found.predictions = run_prediction(settings, console)
        show_prediction(console, found.predictions)
    elif part == "choices":
        found.choices = run_choices(settings, console)
        show_choices(console, found.choices)
    elif part == "growth":
        found.growth = run_growth(folder, settings)
        show_growth(console, found.growth)
    elif part == "prefix":
        for costs in run_prefix(folder, settings):
            found.prefixes.append(costs)
            show_prefix(console, costs)
    elif part == "long":
        found.long = run_long(settings)
        show_long(console, found.long)
    else:
        found.races.append(run_race(folder, part, settings))
        show_race(console, found.races[-1])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description="See benchmarks/bench.py.")
    parser.add_argument("--part", action="append", choices=PARTS, help="again for more; all by default")
    parser.add_argument("--rounds", type=int, help=f"counted rounds; by default {ROUNDS}")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--layers", type=int, help="the first layers only, for a quick look")
    parser.add_argument("--tokens", type=int, default=long.TOKENS, help="of the long example")
    parser.add_argument("--chunk", type=int, default=long.CHUNK, help="of the long example")
    parser.add_argument("--tasks", type=int, action="append", help=f"of the policies, again for more; {policies.TASKS}")
    parser.add_argument("--mixes", type=int, default=prediction.MIXES, help="of the prediction")
    parser.add_argument("--seed", type=int, default=0, help="of the prediction")
    parser.add_argument("--steps", type=int, default=steady.STEPS, help="tiny ones, of growth")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
