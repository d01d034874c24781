"""A task's checkpoint: everything a bit-exact resume needs, in a folder that is whole or absent.

    checkpoints/step-00000012/adapter.safetensors     parameters
                              optimizer.safetensors   both moments of AdamW
                              state.json              counters, the chunk budget, what it belongs to
                              manifest.json           sha-256 of the other three

There is no random-number state to keep: data order and dropout are functions of the job and the step. Folders are
written beside, fsynced and renamed (`muxtune.durable`); a folder without a manifest, or whose hashes differ, is passed
over for the one before. Only safetensors and JSON are read, never a pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from muxtune.durable import staged_folder
from muxtune.engine.task import Task
from muxtune.errors import CheckpointError

_NAME = re.compile(r"step-([0-9]{8})")
_ADAPTER, _OPTIMIZER, _STATE, _MANIFEST = "adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """`data` is the hash of the tokenised training set, `base` that of the backbone's weights."""

    step: int
    trained_tokens: int
    chunk_tokens: int
    data: str
    base: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: CheckpointState
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]


def save(folder: Path, task: Task, *, base: str, keep: int) -> Path:
    """Write the checkpoint of `task` after `task.step` steps, then drop all but the newest `keep`."""
    state = CheckpointState(task.step, task.trained_tokens, task.chunk_tokens, task.data.fingerprint, base)
    path = folder / f"step-{task.step:08d}"
    if _read(path) is not None:
        return path  # the same step has the same bits
    shutil.rmtree(path, ignore_errors=True)  # damaged
    with staged_folder(path, key_file=_MANIFEST) as staging:
        save_file(task.adapter.parameters.export(), staging / _ADAPTER)
        save_file(task.optimizer.moments(), staging / _OPTIMIZER)
        (staging / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        hashes = {name: _sha256(staging / name) for name in (_ADAPTER, _OPTIMIZER, _STATE)}
        (staging / _MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
    for old in _folders(folder)[keep:]:
        shutil.rmtree(old)
    return path


def newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None where there is none.

    Raises CheckpointError where there are checkpoints and all are damaged.
    """
    folders = _folders(folder)
    for path in folders:
        found = _read(path)
        if found is not None:
            return found
    if folders:
        raise CheckpointError("every checkpoint is damaged", where=str(folder), hint="start over with --overwrite")
    return None


def restore(task: Task, checkpoint: Checkpoint, *, base: str) -> None:
    """Put a fresh task where the checkpoint left off.

    Raises CheckpointError where it belongs to another base model or data set, or to an adapter of other shapes.
    """
    where = str(checkpoint.path)
    if checkpoint.state.base != base:
        raise CheckpointError("was trained on other base weights", where=where, hint="use the base model of that run")
    if checkpoint.state.data != task.data.fingerprint:
        raise CheckpointError(
            "the training data has changed since", where=where, hint="restore the data, or start over with --overwrite"
        )
    shapes = {name: view.shape for name, view in task.adapter.parameters.views.items()}
    if {name: tensor.shape for name, tensor in checkpoint.parameters.items()} != shapes:
        raise CheckpointError("holds an adapter of other shapes", where=where)
    task.adapter.parameters.load(checkpoint.parameters)
    task.optimizer.load_moments(checkpoint.moments, checkpoint.state.step)
    task.chunk_tokens = checkpoint.state.chunk_tokens
    task.step = checkpoint.state.step
    task.trained_tokens = checkpoint.state.trained_tokens


def _folders(folder: Path) -> list[Path]:
    """Newest first. Whatever has another name - a folder still being written, say - is not one."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _read(path: Path) -> Checkpoint | None:
    try:
        hashes = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if any(hashes[name] != _sha256(path / name) for name in (_ADAPTER, _OPTIMIZER, _STATE)):
            return None
        state = CheckpointState(**json.loads((path / _STATE).read_text(encoding="utf-8")))
        return Checkpoint(path, state, load_file(path / _ADAPTER), load_file(path / _OPTIMIZER))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
