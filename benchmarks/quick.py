"""`make bench-quick`: whether the ratios that matter still hold. Two minutes on two cores; for development.

    python -m benchmarks.quick [--load light|medium|non-uniform] [--rounds N] [--threads N]

The loads of `bench` on the first layers of SmolLM2-135M, with as small a part of its vocabulary, so that layers, head
and optimizers have the shares of a step that they have in the whole model. On each, muxtune with tasks fused is held
against transformers + peft and against the floor (`race`). `GUARDS` are what the ratios must not fall under: what was
measured when they were set, less a tenth for noise; who makes a load faster raises its guard. They are of a CPU and two
threads. Exits 1 where a ratio is under its guard, or the final losses disagree.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import Recipe
from benchmarks.bench import LOADS, WARMUP
from benchmarks.folders import MODEL, model_folder, plain_model
from benchmarks.machine import describe
from benchmarks.memory import PEFT_NOISE
from benchmarks.race import AGAINST_PEFT, ROOFLINE, RaceResult, race
from benchmarks.report import show_machine
from muxtune.engine.load import load_backbone
from muxtune.models.sources import ModelFolder

LAYERS = 6  # of 30
VOCABULARY = 9824  # of 49,152: a fifth, too
ROUNDS = {"light": 11, "medium": 7, "non-uniform": 3}


@dataclass(frozen=True, slots=True)
class Guard:
    """The least that a load's ratios may be: times transformers + peft, and share of the roofline."""

    peft: float
    roofline: float


GUARDS: Mapping[str, Guard] = {
    "light": Guard(peft=2.5, roofline=0.56),
    "medium": Guard(peft=1.65, roofline=0.58),
    "non-uniform": Guard(peft=1.6, roofline=0.63),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a load came to."""

    result: RaceResult
    guard: Guard

    @property
    def faults(self) -> tuple[str, ...]:
        """Each in words."""
        name, ratios = self.result.load, self.result.ratios
        found = []
        if not ratios[AGAINST_PEFT] >= self.guard.peft:
            found.append(
                f"{name}: {ratios[AGAINST_PEFT]:.2f}x transformers + peft, at least {self.guard.peft:.2f}x wanted"
            )
        if not ratios[ROOFLINE] >= self.guard.roofline:
            found.append(f"{name}: {ratios[ROOFLINE]:.0%} of the roofline, at least {self.guard.roofline:.0%} wanted")
        if not self.result.agrees:
            found.append(f"{name}: final losses are {self.result.loss_gap:.1e} apart: the sides trained differently")
        return tuple(found)


def verdict(name: str, folder: ModelFolder, rounds: int) -> Verdict:
    """Race one load."""
    backbone = load_backbone(folder, device="cpu", dtype="fp32")
    model = plain_model(folder, torch.float32)
    load = LOADS[name](WARMUP + rounds, vocab=backbone.vocabulary)
    return Verdict(race(load, backbone, model, Recipe(), warmup=WARMUP, one_by_one=False), GUARDS[name])


def show(console: Console, verdicts: Sequence[Verdict]) -> None:
    """One row a load, then what is wrong."""
    table = Table(title=f"{LAYERS} layers, fp32, {torch.get_num_threads()} threads", title_justify="left")
    table.add_column("load")
    for name in ("tokens a step", "x peft", "guard", "of roofline", "guard"):
        table.add_column(name, justify="right")
    for one in verdicts:
        tokens = sum(one.result.tokens) / len(one.result.tokens)
        table.add_row(
            one.result.load,
            f"{tokens:.0f}",
            f"{one.result.ratios[AGAINST_PEFT]:.2f}",
            f"{one.guard.peft:.2f}",
            f"{one.result.ratios[ROOFLINE]:.0%}",
            f"{one.guard.roofline:.0%}",
        )
    console.print(table)
    faults = [fault for one in verdicts for fault in one.faults]
    for line in (f"UNDER ITS GUARD: {fault}" for fault in faults):
        console.print(line, highlight=False, soft_wrap=True)
    if not faults:
        console.print("all ratios are above their guards, final losses agree")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description="See benchmarks/quick.py.")
    parser.add_argument("--load", action="append", choices=GUARDS, help="again for more; all by default")
    parser.add_argument("--rounds", type=int, help=f"counted rounds; by default {ROUNDS}")
    parser.add_argument("--threads", type=int, help="of the CPU")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", PEFT_NOISE, FutureWarning)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console, began = Console(), time.monotonic()
    show_machine(console, describe(torch.device("cpu")))
    with model_folder(MODEL, LAYERS, vocabulary=VOCABULARY) as folder:
        verdicts = [verdict(name, folder, options.rounds or ROUNDS[name]) for name in options.load or GUARDS]
    show(console, verdicts)
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    return 1 if any(one.faults for one in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
