"""A task's checkpoint: everything a bit-exact resume needs, in a folder that is whole or absent.

    checkpoints/step-00000012/adapter.safetensors     the adapter's state
                              optimizer.safetensors   both moments of AdamW
                              state.json              counters, the chunk budget, what it belongs to
                              manifest.json           sha-256 of the other three

There is no random-number state to keep: data order and dropout are functions of the job and the step. Folders are
written beside, fsynced and renamed (`muxtune.durable`), and only then are older ones removed, so a process that dies at
any moment leaves the checkpoint before it. A folder without a manifest, or whose hashes differ, is passed over for the
one before. Folders are read as untrusted input: safetensors and JSON through the guards of adapter folders, never a
pickle.

Cost: three times the adapter's bytes written and hashed, four fsyncs and two of folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from muxtune.durable import discard, staged_folder
from muxtune.engine.task import Task
from muxtune.engine.whole import MOMENTS
from muxtune.errors import AdapterError, CheckpointError
from muxtune.models.backbone import BlockName, block_named
from muxtune.models.cache import file_sha256
from muxtune.peft.untrusted import SafetensorsFile, read_json

_NAME = re.compile(r"step-([0-9]{8})")
_ADAPTER, _OPTIMIZER, _STATE, _MANIFEST = "adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_Scalar = TypeVar("_Scalar", int, str)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a task's steps stand on beside its job: where any of it differs, they would have been other steps."""

    base: str  # hash of the backbone's weights
    dtype: str  # the backbone's
    start: str  # hash of the adapter folder's values that the job starts from, empty where it starts afresh
    block: BlockName = "transformers"  # that runs the backbone's layers: its bits are its own


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """`data` is the hash of the tokenised training set."""

    step: int
    trained_tokens: int
    chunk_tokens: int
    data: str
    ground: Ground


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`passed_over` says of each newer checkpoint why it cannot be used."""

    path: Path
    state: CheckpointState
    parameters: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    passed_over: tuple[str, ...] = ()


class _DamagedError(Exception):
    """Why a folder is not a whole checkpoint."""


def save(folder: Path, task: Task, ground: Ground, *, keep: int) -> Path:
    """Write the checkpoint of `task` after `task.step` steps, then drop all but the newest `keep`.

    Raises OSError (or safetensors' own error) where the disk refuses; the older checkpoints are whole then.
    """
    path = folder / f"step-{task.step:08d}"
    if not _whole(path):  # or else it is there already: the same step has the same bits
        discard(path)
        _write(path, task, ground)
    for old in _folders(folder)[keep:]:
        discard(old)
    return path


def newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None where there is none.

    Raises CheckpointError where there are checkpoints and all are damaged.
    """
    damaged: list[str] = []
    for path in _folders(folder):
        try:
            return _read(path, tuple(damaged))
        except _DamagedError as reason:
            damaged.append(f"{path.name}: {reason}")
    if damaged:
        raise CheckpointError(
            f"every checkpoint is damaged: {'; '.join(damaged)}", where=str(folder), hint="start over with --overwrite"
        )
    return None


def read(path: Path) -> Checkpoint:
    """The checkpoint in one folder. Raises CheckpointError where it is not whole."""
    try:
        return _read(path)
    except _DamagedError as reason:
        raise CheckpointError(f"is not a whole checkpoint: {reason}", where=str(path)) from None


def latest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint by its name, None where there is none; none is read."""
    return max(map(_step, _folders(folder)), default=None)


def cut(folder: Path, step: int) -> None:
    """Remove what lies beyond `step`, from which the run goes on: the damaged, which must not count as kept ones."""
    for path in _folders(folder):
        if _step(path) > step:
            discard(path)


def restore(task: Task, checkpoint: Checkpoint, ground: Ground) -> None:
    """Put a fresh task, which stands on `ground` now, where the checkpoint left off.

    Raises CheckpointError where that ground or the data has changed, or where it does not fit the task's adapter.
    """
    state, where = checkpoint.state, str(checkpoint.path)
    _check_ground(state.ground, ground, where)
    if state.data != task.data_fingerprint:
        raise CheckpointError(
            "the training data has changed since", where=where, hint="restore the data, or start over with --overwrite"
        )
    expected = task.whole.template()
    moments = dict.fromkeys(MOMENTS, expected.parameters.values) if state.step else {}
    if _layout(checkpoint.parameters) != expected.layout or _layout(checkpoint.moments) != _layout(moments):
        raise CheckpointError("holds an adapter of other shapes or another dtype", where=where)
    task.whole.load(checkpoint.parameters, checkpoint.moments, state.step)
    task.chunk_tokens = state.chunk_tokens
    task.step = state.step
    task.trained_tokens = state.trained_tokens


def _write(path: Path, task: Task, ground: Ground) -> None:
    state = CheckpointState(task.step, task.trained_tokens, task.chunk_tokens, task.data_fingerprint, ground)
    with staged_folder(path, key_file=_MANIFEST) as staging:
        save_file(task.whole.state(), staging / _ADAPTER)
        save_file(task.whole.moments(), staging / _OPTIMIZER)
        (staging / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        hashes = {name: file_sha256(staging / name) for name in (_ADAPTER, _OPTIMIZER, _STATE)}
        (staging / _MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")


def _check_ground(old: Ground, new: Ground, where: str) -> None:
    if old.base != new.base:
        raise CheckpointError("was trained on other base weights", where=where, hint="use the base model of that run")
    if old.dtype != new.dtype:
        raise CheckpointError(
            f"was trained in another dtype: {old.dtype} -> {new.dtype}", where=where, hint="set the run's dtype to that"
        )
    if old.block != new.block:
        raise CheckpointError(
            f"was trained with another block: {old.block} -> {new.block}, whose results differ in their last bits",
            where=where,
            hint=f"set the run's block to {old.block}, or start over with --overwrite",
        )
    if old.start != new.start:
        raise CheckpointError(
            "the adapter of adapter_path has changed since the training began from it",
            where=where,
            hint="restore that adapter, or start over with --overwrite",
        )


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _folders(folder: Path) -> list[Path]:
    """Newest first. Whatever has another name - a folder still being written, say - is not one."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _whole(path: Path) -> bool:
    try:
        _read(path)
    except _DamagedError:
        return False
    return True


def _read(path: Path, passed_over: tuple[str, ...] = ()) -> Checkpoint:
    """Raises _DamagedError. No file is hashed that is not a plain one, and none loaded whose hash differs."""
    try:
        hashes = read_json(path / _MANIFEST)
        state = _state(read_json(path / _STATE))
        with SafetensorsFile(path / _ADAPTER) as adapter, SafetensorsFile(path / _OPTIMIZER) as optimizer:
            for name in (_ADAPTER, _OPTIMIZER, _STATE):
                if hashes.get(name) != file_sha256(path / name):
                    raise _DamagedError(f"{name} is not what was written")
            parameters, moments = adapter.load(), optimizer.load()
    except AdapterError as error:
        name = Path(error.where).name if error.where else "a file"
        raise _DamagedError(f"{name}: {error.message}") from None
    except OSError as error:
        raise _DamagedError(str(error)) from None
    if state.step != _step(path):
        raise _DamagedError(f"is of step {state.step}")
    return Checkpoint(path, state, parameters, moments, passed_over)


def _state(stored: Mapping[str, object]) -> CheckpointState:
    step, trained_tokens, chunk_tokens = (
        _typed(stored, key, int) for key in ("step", "trained_tokens", "chunk_tokens")
    )
    if min(step, trained_tokens, chunk_tokens - 1) < 0:
        raise _DamagedError(f"{_STATE}: a counter out of range")
    ground = stored.get("ground")
    if not isinstance(ground, dict):
        raise _DamagedError(f"{_STATE}: ground is missing")
    base, dtype, start = (_typed(ground, key, str) for key in ("base", "dtype", "start"))
    try:
        block = block_named(ground.get("block", "transformers"))  # the only one, once
    except ValueError as error:
        raise _DamagedError(f"{_STATE}: {error}") from None
    data = _typed(stored, "data", str)
    return CheckpointState(step, trained_tokens, chunk_tokens, data, Ground(base, dtype, start, block))


def _typed(stored: Mapping[str, object], key: str, kind: type[_Scalar]) -> _Scalar:
    value = stored.get(key)
    if type(value) is not kind:
        raise _DamagedError(f"{_STATE}: {key} is not of type {kind.__name__}")
    return value
