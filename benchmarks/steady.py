"""Whether a process's memory stays where it is over many steps: tiny ones, so that there can be many.

A process of its own (`python -m benchmarks.steady STEPS` prints a `Steady` as JSON) trains two tasks of a tiny random
model through the round loop, planned, with metrics and a trace on disk, and looks at its resident memory as it goes.
The first quarter is left out: caches fill, and memory that has been freed is found again.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.baselines import Recipe
from benchmarks.folders import tiny_folder
from benchmarks.loads import light
from benchmarks.made_up import table
from benchmarks.overhead import steps_of
from benchmarks.sides import engine_side
from muxtune.engine.load import load_backbone
from muxtune.engine.planning import Planning
from muxtune.plan.memory import MemoryModel

ROOT = Path(__file__).parents[1]
STEPS = 20_000
LOOKS = 40
FLAT_BYTES = 2**20  # over all counted steps


@dataclass(frozen=True, slots=True)
class Steady:
    """Resident bytes at equal distances over `steps` steps of each task, the first quarter left out."""

    steps: int
    rss_bytes: tuple[int, ...]

    @property
    def growth_bytes(self) -> int:
        """The mean of the last quarter of what was seen over that of the first."""
        quarter = max(1, len(self.rss_bytes) // 4)
        return (sum(self.rss_bytes[-quarter:]) - sum(self.rss_bytes[:quarter])) // quarter

    @property
    def flat(self) -> bool:
        return self.growth_bytes < FLAT_BYTES


def steady(steps: int = STEPS) -> Steady:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.steady", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stderr}")
    return Steady(**json.loads(done.stdout.splitlines()[-1]))


def train(steps: int) -> Steady:
    """The steps, here."""
    process, seen = psutil.Process(), []
    with tiny_folder() as folder, tempfile.TemporaryDirectory() as output:
        backbone = load_backbone(folder, device="cpu", dtype="fp32")
        planning = Planning(table, MemoryModel(), backbone.places)
        load = light(8, vocab=backbone.vocabulary, tasks=2)
        recipe = Recipe(schedule_steps=steps)
        side = engine_side(backbone, load, recipe, policy="muxtune", planning=planning)
        first, every = steps // 4, max(1, steps // LOOKS)
        for done in steps_of(side, Path(output)):
            if done >= first and done % every == 0:
                gc.collect()
                seen.append(process.memory_info().rss)
    return Steady(steps, tuple(seen))


def main(arguments: Sequence[str]) -> int:
    """The child: one thread, since there is not enough to do for two."""
    torch.set_num_threads(1)
    print(json.dumps(asdict(train(int(arguments[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
