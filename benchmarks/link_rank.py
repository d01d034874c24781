"""One rank of `benchmarks.link`: trains the same tasks in several ways and prints what each took, as a line of JSON.

    python -m benchmarks.link_rank FOLDER MEETING RANK --tasks 4 --tokens 128 --rounds 5

A *way* is who runs together: `alone` one pass after another; `turns` the passes of all tasks in one slot; `fused` the
same with tasks fused two by two. Ways alternate, so that a noisy moment meets all of them. A round is one optimizer
step of every task, forward, backward and step; the first of each way is not counted. Stalls are those of the layers'
collectives, from the record of what ran when; the few exchanges of embedding and loss wait, and count as compute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.parallel.mesh import TensorAxis, join, leave
from muxtune.parallel.tensor import load_sharded
from muxtune.plan.timeline import Timeline
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import Lora

TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Way:
    """`fuse`: rows of a pass, in tasks."""

    together: int
    overlap: bool
    fuse: int


def ways(tasks: int) -> dict[str, Way]:
    """By name."""
    return {
        "alone": Way(1, False, 1),
        "turns": Way(tasks, True, 1),
        "fused": Way(tasks, True, max(1, tasks // 2)),
    }


def main() -> None:
    """One rank, until it is done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("meeting")
    parser.add_argument("rank", type=int)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    axis = join(asked.rank, 2, meeting=asked.meeting, timeout_s=TIMEOUT_S)
    try:
        told = measured(axis, asked.folder, asked.tasks, asked.tokens, asked.rounds)
    finally:
        leave()
    print(json.dumps(told), flush=True)


def measured(axis: TensorAxis, folder: Path, tasks: int, tokens: int, rounds: int) -> Mapping[str, Mapping[str, float]]:
    """Seconds of a round, tokens a second, stall share and shared time of each way."""
    backbone = load_sharded(folder, axis, dtype=torch.float32, device=torch.device("cpu"))
    engines = {
        name: Engine(backbone, together=way.together, overlap=way.overlap, fuse_tokens=way.fuse * tokens)
        for name, way in ways(tasks).items()
    }
    for engine in engines.values():
        _attach(engine, tasks, tokens)
    lines: dict[str, list[Timeline]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            lines[name].append(_round(engine, tasks * tokens))
    return {name: _told(found[1:]) for name, found in lines.items()}


def _attach(engine: Engine, tasks: int, tokens: int) -> None:
    for number in range(tasks):
        job = JobSpec(
            name=f"task-{number}",
            datasets=["unread.jsonl"],
            peft=Lora(r=8),
            per_device_train_batch_size=1,
            max_steps=1000,
            learning_rate=1e-4,
            seed=number,
        )
        drawn = np.random.default_rng(number).integers(0, engine.backbone.vocabulary, tokens + 1).astype(np.int32)
        mask = np.arange(tokens + 1) >= tokens // 2  # the second half is trained
        engine.attach(job, Sequences((TokenSequence(0, drawn, mask),)))


def _round(engine: Engine, tokens: int) -> Timeline:
    schedule = engine.schedule([task.participant() for task in engine.tasks.values()])
    began = time.perf_counter()
    record = engine.recorded(schedule, time.perf_counter)
    return Timeline(1, record.events, time.perf_counter() - began, 1, tokens)


def _told(lines: Sequence[Timeline]) -> Mapping[str, float]:
    return {
        "round_s": median(line.wall_s for line in lines),
        "tokens_per_s": median(line.tokens_per_s for line in lines),
        "stall_share": median(line.stall_share for line in lines),
        "utilisation": median(line.utilisation[0] for line in lines),
    }


if __name__ == "__main__":
    main()
