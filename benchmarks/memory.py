"""Memory of N tasks, each of which has done a real training step: PSS and RSS, summed over processes.

A child process builds its tasks, trains one step, says so and waits; when all have, the parent reads
`/proc/<pid>/smaps_rollup`. PSS shares pages among the processes that map them (the safetensors file of the backbone),
so its sum is what the machine really holds; the sum of RSS is what separate devices would hold. Children start one
after another, so that their steps do not compete for cores. A layout that would not fit the memory that is free now
is not run, and says so, judged by what each process more took so far.

A contender is a dotted name `module:function`; the function takes the model's folder and the number of tasks, trains
one step of each, and returns whatever must stay alive.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]  # where `python -m benchmarks...` finds this package
READY = "ready"
HEADROOM = 0.9  # share of the free memory that children may take
PEFT = "benchmarks.memory:peft_tasks"
# peft 0.21 asks transformers 5.24 for the property's old name.
PEFT_NOISE = "`is_gradient_checkpointing` is deprecated"
Contender = Callable[[Path, int], object]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of all processes of one layout, or why it was not run."""

    processes: int
    pss_bytes: int = 0
    rss_bytes: int = 0
    not_run: str | None = None


def measure(contender: str, model: Path, *, tasks: int, processes: int = 1) -> Memory:
    """`processes` processes of `tasks` tasks each, all alive when measured."""
    children: list[subprocess.Popen[str]] = []
    free_bytes = psutil.virtual_memory().available
    try:
        for count in range(processes):
            if short := _shortage(children, processes - count, free_bytes):
                return Memory(processes, not_run=short)
            children.append(_start(contender, model, tasks))
        usages = [_usage(child.pid) for child in children]
        return Memory(processes, sum(pss for pss, _ in usages), sum(rss for _, rss in usages))
    finally:
        for child in children:
            child.communicate()  # closes its input, at which it ends


def _shortage(children: Sequence[subprocess.Popen[str]], missing: int, free_bytes: int) -> str | None:
    if len(children) < 2:
        return None
    taken = [_usage(child.pid)[0] for child in children]
    needed = sum(taken) + missing * min(taken)  # the newest child's pages are shared by most: the least PSS
    if needed < HEADROOM * free_bytes:
        return None
    return f"about {needed / 1e9:.0f} GB needed, {free_bytes / 1e9:.0f} GB free"


def _start(contender: str, model: Path, tasks: int) -> subprocess.Popen[str]:
    python = [sys.executable, "-W", f"ignore:{PEFT_NOISE}:FutureWarning"]
    command = [*python, "-m", "benchmarks.memory", contender, str(model.resolve()), str(tasks)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == READY:
            return child
    child.communicate()
    raise RuntimeError(f"{contender} ended with {child.returncode} before its step was done")


def _usage(pid: int) -> tuple[int, int]:
    """(PSS, RSS) of one process in bytes."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["Pss"], fields["Rss"]


def peft_tasks(folder: Path, tasks: int) -> object:
    """transformers + peft: one task plainly, several through peft's multi-adapter API."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.baselines import Recipe, initial_matrices, many_adapters, task_by_task
    from benchmarks.loads import light
    from muxtune.models.loading import reading

    with reading("the model", folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    recipe = Recipe()
    load = light(1, vocab=model.config.vocab_size, tasks=tasks)
    side = (task_by_task if tasks == 1 else many_adapters)(model, load, recipe, initial_matrices(model, recipe))
    side.step(0)
    return side


def main() -> None:
    """The child: build, train a step, report, and wait until the parent closes our input."""
    contender, folder, tasks = sys.argv[1:]
    module, name = contender.split(":")
    run: Contender = getattr(importlib.import_module(module), name)
    kept = run(Path(folder), int(tasks))
    gc.collect()
    print(READY, flush=True)
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
