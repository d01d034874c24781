"""A process that trains under a limit on its data segment: `python -m tests.engine.starved`, for test_starved.py.

Three tasks of 200 tokens, one whose single chunk of 1,600 has room only where it is computed twice, and one of 2,200
that has none. Each is first trained alone without a limit; then all together with little to spare: what they bring
together does not fit, nor do the two alone. Prints what became of them as JSON. Allocations are given back to the
system when freed (MALLOC_MMAP_THRESHOLD_ must be set), so that the limit means what it says.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Sequences, Task
from muxtune.models import attention
from muxtune.models.backbone import Backbone
from muxtune.spec.event import TaskEvent
from muxtune.spec.job import JobSpec
from tests.sequences import random_sequences
from tests.tiny_tokenizer import VOCAB

# Three small tasks together take 100 MB, the tight one 190 or (computed twice) 130, the large one 260 or 180.
SPARE_BYTES = 160_000_000
LENGTHS = {"one": 200, "two": 200, "large": 2200, "tight": 1600, "three": 200}


def _backbone() -> Backbone:
    torch.manual_seed(0)
    attention.register()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=4096,
    )  # fmt: skip
    return Backbone(LlamaForCausalLM(config))


def _attach(engine: Engine, name: str) -> Task:
    job = JobSpec(name=name, datasets=["none.jsonl"], max_steps=2, per_device_train_batch_size=1, learning_rate=1e-3)
    data = Sequences(random_sequences([LENGTHS[name]] * 2, seed=len(name)))
    return engine.attach(job, data, chunk_tokens=max(LENGTHS.values()))


def _trained(backbone: Backbone, names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """Values by task, what those that failed were told, and who was told of computing twice."""
    engine = Engine(backbone, fuse_tokens=4096)
    tasks = [_attach(engine, name) for name in names]
    events = [event for event in Runner(engine).run() if isinstance(event, TaskEvent)]
    failed = {event.task: event.message for event in events if event.kind == "failed"}
    spared = [event.task for event in events if event.kind == "warning" and "computed twice" in event.message]
    return {task.name: task.adapter.parameters.values.detach().clone() for task in tasks}, failed, spared


def main() -> None:
    assert os.environ["MALLOC_MMAP_THRESHOLD_"], "or the limit means little"
    backbone = _backbone()
    alone = {name: _trained(backbone, [name])[0][name] for name in LENGTHS}
    (held,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line]
    limit = int(held) * 1024 + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    together, failed, spared = _trained(backbone, list(LENGTHS))
    equal = {name: torch.equal(together[name], alone[name]) for name in LENGTHS}
    print(json.dumps({"failed": failed, "spared": spared, "equal": equal}))


if __name__ == "__main__":
    main()
