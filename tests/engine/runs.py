"""Whole runs on a tiny model, in this process or in one that can be killed, and what they left on disk.

The folder's content is read here by plain means - JSON, hashes, names - and not through the code under test.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from muxtune.engine.training import TrainingRun
from muxtune.spec.event import RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.run import RunSpec
from tests.engine.trainer import Order

ROOT = Path(__file__).parents[2]
DIED = -signal.SIGKILL
Keys = Mapping[str, Any]

# Three tasks whose epochs (4, 5 and 3 steps), savings and ends never coincide. In all of them order, dropout, schedule
# and moments matter to every step.
JOBS: Mapping[str, Keys] = {
    "sql": {
        "datasets": ["sql.jsonl"],  # 7 examples, saved each epoch of 4 steps: 4, 8, 12
        "peft": {"r": 4, "lora_dropout": 0.1},
        "per_device_train_batch_size": 2,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "num_train_epochs": 3,
        "seed": 7,
    },
    "chat": {
        "datasets": ["chat.jsonl"],  # 10 examples, epochs of 5 steps
        "peft": {"r": 8, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]},
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "learning_rate": 3e-2,
        "max_steps": 13,
        "save_steps": 3,
        "save_total_limit": 1,
        "validation": {"path": "held-out.jsonl", "eval_steps": 4},
    },
    "text": {
        "datasets": ["text.jsonl"],  # 8 examples, epochs of 3 steps, the last one smaller
        "peft": {"r": 4, "target_modules": ["v_proj", "o_proj"]},
        "per_device_train_batch_size": 3,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "num_train_epochs": 3,
        "save_steps": 2,
    },
}
STEPS = {"sql": 12, "chat": 13, "text": 9}


def write_data(folder: Path) -> Path:
    """The files that JOBS read."""
    lines: dict[str, list[object]] = {
        "sql.jsonl": [
            {"prompt": f"How many users are above {age}? ", "completion": f"SELECT COUNT(*) WHERE age > {age};"}
            for age in range(30, 37)
        ],
        "chat.jsonl": [_dialogue(number) for number in range(10)],
        "held-out.jsonl": [_dialogue(number) for number in range(20, 23)],
        "text.jsonl": [
            {"text": f"The quick brown fox {number} jumps over " + "the lazy dog " * (number % 3)}
            for number in range(8)
        ],
    }
    for name, rows in lines.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _dialogue(number: int) -> object:
    return {
        "messages": [
            {"role": "user", "content": f"Is {number} a number? " + "Answer yes or no. " * (number % 3)},
            {"role": "assistant", "content": f"yes, {number} is"},
        ]
    }


def job(data: Path, name: str, like: str | None = None, **changes: Any) -> JobSpec:
    """The job of JOBS called `like` (or `name`), with `changes`."""
    keys = {"name": name, **JOBS[like or name], **changes}
    keys["datasets"] = [str(data / path) for path in keys["datasets"]]
    if keys.get("validation"):
        keys["validation"] = {**keys["validation"], "path": str(data / keys["validation"]["path"])}
    return JobSpec(**keys)


def run_of(model: Path, output: Path, jobs: Sequence[JobSpec], **keys: Any) -> RunSpec:
    return RunSpec(base_model=str(model), output_dir=str(output), jobs=tuple(jobs), **keys)


def train(run: RunSpec, **options: Any) -> list[RunEvent]:
    """The whole run in this process; `options` are a `TrainingRun`'s."""
    return list(TrainingRun(run, **options).events())


def stop_after(rounds: int) -> Callable[[], bool]:
    """A `stop` that says so once `rounds` rounds are done."""
    asked = count()
    return lambda: next(asked) >= rounds


def steps_of(events: Iterable[RunEvent], name: str) -> list[int]:
    return [event.step for event in events if isinstance(event, StepResult) and event.task == name]


def losses_of(events: Iterable[RunEvent], name: str) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepResult) and event.task == name]


def told(events: Iterable[RunEvent], name: str) -> list[str]:
    """The kinds of a task's events but for its checkpoints and its place in the queue."""
    kinds = [event.kind for event in events if isinstance(event, TaskEvent) and event.task == name]
    return [kind for kind in kinds if kind not in ("checkpoint", "queued")]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, and what it says it executed: task -> steps in order."""

    code: int
    error: str
    operations: int
    steps: Mapping[str, list[Keys]]


class Trainer:
    """The other side of `tests.engine.trainer`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = 0
        self._running: set[int] = set()
        self._process: subprocess.Popen[str] | None = None

    def run(self, run: RunSpec, **order: Any) -> Ended:
        return self.start(run, **order).wait()

    def start(self, run: RunSpec, **order: Any) -> Child:
        """A process that carries out the run; `order` are the further fields of an `Order`."""
        self._orders += 1
        trace, report = (self._folder / f"{self._orders}.{kind}" for kind in ("trace", "report"))
        made = Order(run.model_dump(mode="json"), str(trace), str(report), **order)
        pid = self._ask({"do": "start", "order": asdict(made)})
        self._running.add(pid)
        return Child(self, pid, trace, report)

    def wait(self, pid: int) -> int:
        """The exit code, negative for a signal."""
        code = self._ask({"do": "wait", "pid": pid})
        self._running.discard(pid)
        return code

    def _ask(self, message: Keys) -> int:
        if self._process is None:
            self._process = self._begin()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.communicate()

    def _begin(self) -> subprocess.Popen[str]:
        cache = self._folder / "cache"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.engine.trainer"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@dataclass(frozen=True, slots=True)
class Child:
    trainer: Trainer
    pid: int
    trace: Path
    report: Path

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Ended:
        code = self.trainer.wait(self.pid)
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        steps: dict[str, list[Keys]] = {}
        for line in map(json.loads, lines):
            steps.setdefault(line["task"], []).append(line)
        report = json.loads(self.report.read_text()) if self.report.exists() else {"error": "", "operations": 0}
        return Ended(code, report["error"], report["operations"], steps)


def whole_checkpoints(folder: Path) -> list[int]:
    """Steps of a task's whole checkpoints, ascending."""
    found = []
    for path in sorted(folder.glob("checkpoints/step-*")):
        try:
            hashes = json.loads((path / "manifest.json").read_text())
            whole = all(
                hashlib.sha256((path / name).read_bytes()).hexdigest() == digest for name, digest in hashes.items()
            )
        except (OSError, ValueError):
            whole = False
        if whole:
            found.append(int(path.name.removeprefix("step-")))
    return found


def newest_step(folder: Path) -> int:
    return max(whole_checkpoints(folder), default=0)


def status(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["status"])


def metrics(folder: Path) -> list[Keys]:
    """Rows without their times; the CSV must say the same."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [{key: float(value) for key, value in line.items() if value} for line in table] == rows
    return [{key: value for key, value in row.items() if key != "train/step_time_s"} for row in rows]


def bits(folder: Path) -> dict[str, str]:
    """Hashes of what a task has come to: its newest checkpoint, both parts, and its adapter."""
    newest = folder / "checkpoints" / f"step-{newest_step(folder):08d}"
    files = [newest / "adapter.safetensors", newest / "optimizer.safetensors", newest / "state.json"]
    files += [folder / "adapter_model.safetensors", folder / "adapter_config.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.exists()}


def assert_same_result(one: Path, other: Path) -> None:
    """Two folders of one job: the same bits, the same history, nothing half-written, and no step twice."""
    assert status(one) == status(other) == "completed"
    assert bits(one) == bits(other) and len(bits(one)) == 5
    assert metrics(one) == metrics(other)
    trained = Counter(row["train/global_step"] for row in metrics(one) if "train/loss" in row)
    assert set(trained.values()) == {1} and sorted(trained) == list(range(1, len(trained) + 1))
    assert whole_checkpoints(one) == whole_checkpoints(other)
    left = {path.name for path in one.rglob("*")} ^ {path.name for path in other.rglob("*")}
    assert not left
    for line in (one / "events.jsonl").read_text().splitlines():
        json.loads(line)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is such a disk: a killed process loses nothing of it, and fsync costs nothing."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="muxtune-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)
