"""Configs and data for the command line's tests: small, and learnt in seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Keys = Mapping[str, Any]
ESCAPE = re.compile(r"\x1b")

DEFAULTS: Keys = {
    "peft": {"type": "lora", "r": 4, "lora_alpha": 8},
    "learning_rate": 2e-2,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "seed": 7,
    "logging_steps": 2,
}

# `chat` always answers the same, so that it learns to stop; `sql` is of another shape and PEFT size.
TRAINED: Mapping[str, Keys] = {
    "chat": {"datasets": [{"path": "data/chat.jsonl"}], "max_steps": 40, "sample_prompts": ["Is 3 a number?"]},
    "sql": {
        "datasets": [{"path": "data/sql.jsonl"}],
        "peft": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        "validation": {"path": "data/sql.val.jsonl", "eval_steps": 2},
    },
}


def write_data(folder: Path) -> None:
    """data/*.jsonl in `folder`."""
    (folder / "data").mkdir(exist_ok=True)
    files: dict[str, list[object]] = {
        "chat.jsonl": [_dialogue(number) for number in range(4)],
        "sql.jsonl": [_question(age) for age in range(30, 36)],
        "sql.val.jsonl": [_question(age) for age in (40, 41)],
        "pairs.jsonl": [_pair(number) for number in range(6)],
    }
    for name, rows in files.items():
        (folder / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data" / "empty.jsonl").touch()
    (folder / "data" / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 5}\nnot json\n')


def write_config(path: Path, model: Path, output: str, jobs: Mapping[str, Keys], **run: Any) -> Path:
    """A config with DEFAULTS under each job; `output` is relative to the working folder of the command."""
    listed = [{"name": name, **keys} for name, keys in jobs.items()]
    top = {"base_model": str(model), "output_dir": output, "threads": 1, "defaults": dict(DEFAULTS), "jobs": listed}
    path.write_text(yaml.safe_dump({**top, **run}, sort_keys=False))
    return path


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def status(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["status"])


def _dialogue(number: int) -> object:
    user = {"role": "user", "content": f"Is {number} a number?"}
    return {"messages": [user, {"role": "assistant", "content": "yes"}]}


def _question(age: int) -> object:
    return {"prompt": f"How many users are above {age}? ", "completion": f"SELECT COUNT(*) WHERE age > {age};"}


def _pair(number: int) -> object:
    return {
        "prompt": [{"role": "user", "content": f"Is {number} a number?"}],
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no idea"}],
    }
