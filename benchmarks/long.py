"""One long example in chunks against the same example in one pass: memory and time of an optimizer step.

Each side is a process of its own (`python -m benchmarks.long FOLDER TOKENS CHUNK KEPT THREADS` prints a `Side` as JSON)
that trains two steps of one LoRA task (r 8, all-linear, every token a target): the first warms up, the second is timed.
Memory is what the process's peak grew by since the task was attached, so this is for the CPU only. Sides run one after
another, whole first, then in chunks whose forward pass runs twice, then in chunks that keep their activations;
`carried` is what the keys and values of the sequence and their gradient take of it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.load import load_backbone
from muxtune.engine.task import Sequences
from muxtune.models.backbone import Backbone
from muxtune.models.sources import resolve
from muxtune.spec.job import JobSpec

ROOT = Path(__file__).parents[1]
TOKENS = 4096
CHUNK = 512
LAYERS = 10  # 4,096 tokens of all of SmolLM2's layers in one pass take 7 GB
LOSS_TOLERANCE = 1e-5  # relative


@dataclass(frozen=True, slots=True)
class Side:
    """What one process measured of an example of `tokens` in chunks of `chunk`, of which activations were `kept`."""

    tokens: int
    chunk: int
    kept: bool
    loss: float
    step_s: float
    grown_bytes: int
    carried_bytes: int

    @property
    def name(self) -> str:
        if self.tokens <= self.chunk:
            return f"{self.tokens} tokens in one pass"
        return f"in chunks of {self.chunk}{', activations kept' * self.kept}"


@dataclass(frozen=True, slots=True)
class LongCosts:
    """The example whole and in other ways, the whole one first; `chunk_alone` is one that is as long as a chunk."""

    sides: tuple[Side, ...]
    chunk_alone: Side

    @property
    def agrees(self) -> bool:
        whole = self.sides[0].loss
        return all(abs(side.loss / whole - 1) < LOSS_TOLERANCE for side in self.sides)


def long_costs(folder: Path, *, tokens: int = TOKENS, chunk: int = CHUNK) -> LongCosts:
    """Of the model in a folder."""
    sides = (measure(folder, tokens, tokens), *(measure(folder, tokens, chunk, kept=kept) for kept in (False, True)))
    return LongCosts(sides, measure(folder, chunk, chunk))


def measure(folder: Path, tokens: int, chunk: int, *, kept: bool = False) -> Side:
    """One side in a process of its own, with as many threads as this one."""
    asked = (folder, tokens, chunk, int(kept), torch.get_num_threads())
    command = [sys.executable, "-m", "benchmarks.long", *map(str, asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stderr}")
    return Side(**json.loads(done.stdout.splitlines()[-1]))


def train(folder: Path, tokens: int, chunk: int, *, kept: bool) -> Side:
    """The two steps, here."""
    backbone = load_backbone(resolve(str(folder)), device="cpu", dtype="fp32")
    ids = np.random.default_rng(1).integers(0, backbone.vocabulary, tokens).astype(np.int32)
    mask = np.arange(tokens) > 0
    engine = Engine(backbone, keep_tokens=tokens if kept else 0)
    job = JobSpec(name="long", datasets=["none.jsonl"], max_steps=2, per_device_train_batch_size=1)
    task = engine.attach(job, Sequences((TokenSequence(0, ids, mask),)), chunk_tokens=chunk)
    before = psutil.Process().memory_info().rss
    loss = seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        (outcome,) = [a.step for a in engine.execute(engine.schedule([task.participant()])).actions if a.step]
        loss, seconds = outcome.loss, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Side(tokens, chunk, kept, loss, seconds, peak - before, _carried_bytes(backbone, tokens, chunk))


def _carried_bytes(backbone: Backbone, tokens: int, chunk: int) -> int:
    """Keys and values of all positions, and a gradient of all but those of the last piece."""
    _, groups, width = backbone.attention_shape
    position = 2 * len(backbone.blocks) * groups * width * torch.float32.itemsize
    last = (tokens - 1) // chunk * chunk
    return position * (tokens + last) if last else 0


def main(arguments: Sequence[str]) -> int:
    folder, tokens, chunk, kept, threads = arguments
    torch.set_num_threads(int(threads))
    print(json.dumps(asdict(train(Path(folder), int(tokens), int(chunk), kept=bool(int(kept))))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
