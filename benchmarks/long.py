"""One long example in chunks against the same example in one pass: memory and time of an optimizer step.

    python -m benchmarks.long [--tokens 8192] [--chunk 512] [--layers N] [--model NAME]

Each side is a process of its own that trains two steps of one LoRA task (r 8, all-linear, every token a target): the
first warms up, the second is timed. Memory is what the process's peak grew by since the task was attached. Sides run
one after another, whole first; `carried` is what the keys and values of the sequence and their gradient take of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Side:
    """What one process measured."""

    chunk: int
    loss: float
    step_s: float
    grown_bytes: int
    carried_bytes: int


def measure(model: str, tokens: int, chunk: int, layers: int | None) -> Side:
    """One side in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.long",
        "--model",
        model,
        "--tokens",
        str(tokens),
        "--child",
        str(chunk),
    ]
    command += ["--layers", str(layers)] if layers is not None else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Side(**json.loads(done.stdout.splitlines()[-1]))


def train(model: str, tokens: int, chunk: int, layers: int | None) -> Side:
    """The two steps, here."""
    import numpy as np
    import torch

    from muxtune.data.types import TokenSequence
    from muxtune.engine.engine import Engine
    from muxtune.engine.load import load_backbone
    from muxtune.engine.task import Sequences
    from muxtune.models.sources import resolve
    from muxtune.spec.job import JobSpec

    backbone = load_backbone(resolve(model), device="cpu", dtype="fp32", num_hidden_layers=layers)
    ids = np.random.default_rng(1).integers(0, backbone.vocabulary, tokens).astype(np.int32)
    mask = np.arange(tokens) > 0
    engine = Engine(backbone)
    job = JobSpec(name="long", datasets=["none.jsonl"], max_steps=2, per_device_train_batch_size=1)
    task = engine.attach(job, Sequences((TokenSequence(0, ids, mask),)), chunk_tokens=chunk)
    before = psutil.Process().memory_info().rss
    loss = seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        (outcome,) = [a.step for a in engine.execute(engine.schedule([task.participant()])).actions if a.step]
        loss, seconds = outcome.loss, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _, groups, width = backbone.attention_shape
    position = 2 * len(backbone.blocks) * groups * width * torch.float32.itemsize
    last = (tokens - 1) // chunk * chunk
    return Side(chunk, loss, seconds, peak - before, position * (tokens + last) if last else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long", description="See benchmarks/long.py.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(asdict(train(options.model, options.tokens, options.child, options.layers))))
        return 0
    sizes = (options.tokens, options.chunk)
    whole, cut = (measure(options.model, options.tokens, chunk, options.layers) for chunk in sizes)
    one = measure(options.model, options.chunk, options.chunk, options.layers)
    table = Table("side", "step s", "memory grown MB", "of it carried MB", "loss")
    rows = (("one pass", whole), (f"chunks of {options.chunk}", cut), (f"an example of {options.chunk}", one))
    for name, side in rows:
        table.add_row(
            name,
            f"{side.step_s:.1f}",
            f"{side.grown_bytes / 1e6:.0f}",
            f"{side.carried_bytes / 1e6:.0f}",
            f"{side.loss:.6f}",
        )
    console = Console()
    console.print(table)
    console.print(f"time {cut.step_s / whole.step_s:.2f}x, memory {cut.grown_bytes / whole.grown_bytes:.3f}x")
    return 0 if abs(cut.loss / whole.loss - 1) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
