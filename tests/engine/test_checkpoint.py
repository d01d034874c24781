"""A checkpoint gives back exactly what was saved, or says why it does not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from muxtune.engine import checkpoint
from muxtune.engine.checkpoint import Ground
from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Task
from muxtune.errors import CheckpointError
from muxtune.models.backbone import Backbone
from tests.engine.build import Trial, attach, backbone_of, outcome, run

GROUND = Ground("base", "float32", "")
TRIAL = Trial("a", lengths=[9, 17, 5, 30, 12, 8], batch=2, steps=7, dropout=0.2, chunk_tokens=24, shuffle=True)
FILES = ("adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(layers=1)


def task_at(backbone: Backbone, step: int, trial: Trial = TRIAL) -> tuple[Engine, Task]:
    engine = Engine(backbone)
    task = attach(engine, trial)
    advance(engine, task, step)
    return engine, task


def advance(engine: Engine, task: Task, step: int) -> None:
    for _ in Runner(engine, stop=lambda: task.step >= step).run():
        pass


@pytest.fixture
def saved(backbone: Backbone, tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    engine, task = task_at(backbone, 2)
    checkpoint.save(tmp_path, task, GROUND, keep=2)
    advance(engine, task, 4)
    checkpoint.save(tmp_path, task, GROUND, keep=2)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_restored_task_goes_on_bit_for_bit(backbone: Backbone, saved: Path) -> None:
    engine, task = task_at(backbone, 0)
    undisturbed = outcome(task, run(engine)["a"])
    found = checkpoint.newest(saved)
    assert found is not None and (found.state.step, found.passed_over) == (4, ())
    engine, task = task_at(backbone, 0, replace(TRIAL, chunk_tokens=None))
    checkpoint.restore(task, found, GROUND)
    assert task.step == 4 and task.trained_tokens > 0
    shutil.rmtree(saved)  # nothing of it is still needed
    steps = run(engine)["a"]
    assert [step.step for step in steps] == [5, 6, 7]
    resumed = outcome(task, steps)
    assert resumed.losses == undisturbed.losses[4:]
    assert resumed.learning_rates == undisturbed.learning_rates[4:]
    assert torch.equal(resumed.values, undisturbed.values)
    assert resumed.moments.keys() == undisturbed.moments.keys() == {"exp_avg", "exp_avg_sq"}
    assert all(torch.equal(resumed.moments[name], undisturbed.moments[name]) for name in resumed.moments)


def test_a_resumed_task_keeps_its_own_chunks(backbone: Backbone, saved: Path) -> None:
    _, original = task_at(backbone, 4)
    _, task = task_at(backbone, 0, replace(TRIAL, chunk_tokens=None))
    fresh_chunks = task.chunk_tokens
    found = checkpoint.newest(saved)
    assert found is not None
    checkpoint.restore(task, found, GROUND)
    assert (task.chunk_tokens, fresh_chunks) == (24, 512)
    assert task.participant() == original.participant()
    assert len(task.participant().chunks) > 1


def test_before_the_first_step(backbone: Backbone, tmp_path: Path) -> None:
    _, task = task_at(backbone, 0)
    checkpoint.save(tmp_path, task, GROUND, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.state.step == 0
    engine, fresh = task_at(backbone, 0)
    checkpoint.restore(fresh, found, GROUND)
    assert len(run(engine)["a"]) == TRIAL.steps


def test_there_may_be_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "checkpoints") is None
    (tmp_path / "checkpoints/.step-00000003.0123abcd.staged").mkdir(parents=True)
    assert checkpoint.newest(tmp_path / "checkpoints") is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


def link(path: Path) -> None:
    moved = path.rename(path.with_name("elsewhere"))
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, empty, deep, link, pipe, Path.unlink])
def test_a_damaged_one_is_passed_over(damage: Callable[[Path], None], name: str, saved: Path) -> None:
    damage(saved / "step-00000004" / name)
    found = checkpoint.newest(saved)
    assert found is not None and found.state.step == 2
    (reason,) = found.passed_over
    assert reason.startswith("step-00000004: ") and len(reason) > 25
    damage(saved / "step-00000002" / name)
    with pytest.raises(
        CheckpointError, match=r"every checkpoint is damaged: step-00000004: .*; step-00000002: "
    ) as caught:
        checkpoint.newest(saved)
    assert caught.value.where == str(saved) and "--overwrite" in str(caught.value)


def test_a_checkpoint_under_another_steps_name_is_none(saved: Path) -> None:
    (saved / "step-00000004").rename(saved / "step-00000009")
    found = checkpoint.newest(saved)
    assert found is not None and found.passed_over == ("step-00000009: is of step 4",)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "4"},
        {"step": True},
        {"trained_tokens": -1},
        {"chunk_tokens": 0},
        {"data": None},
        {"ground": []},
        {"ground": {"base": "base", "dtype": "float32", "start": "", "block": "slow"}},
    ],
    ids=str,
)
def test_a_state_that_makes_no_sense_is_damage(changes: dict[str, object], saved: Path) -> None:
    forge(saved / "step-00000004", "state.json", lambda old: json.dumps({**json.loads(old), **changes}).encode())
    found = checkpoint.newest(saved)
    assert found is not None and found.state.step == 2
    assert found.passed_over[0].startswith("step-00000004: state.json")


def forge(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and its hash with it, as an attacker would."""
    data = change((path / name).read_bytes())
    (path / name).write_bytes(data)
    hashes = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**hashes, name: hashlib.sha256(data).hexdigest()}))


def test_random_damage_is_never_believed(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is damaged: what comes back is one of the two that were saved, and no other error escapes."""
    good = {found.state.step: found for found in (checkpoint.newest(saved),) if found is not None}
    random_ = random.Random(0)
    for _ in range(150):
        path = saved / "step-00000004" / random_.choice(FILES)
        before = path.read_bytes()
        at = random_.randrange(len(before))
        torn = before[:at] if random_.random() < 0.3 else before[:at] + random_.randbytes(1) + before[at + 1 :]
        path.write_bytes(torn)
        found = checkpoint.newest(saved)
        assert found is not None and found.state.step in (2, 4)
        if found.state.step == 4:  # a blank of the manifest, or the same byte
            assert found.state == good[4].state
            assert all(torch.equal(found.moments[name], good[4].moments[name]) for name in good[4].moments)
        path.write_bytes(before)


class Canary:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["adapter.safetensors", "optimizer.safetensors", "state.json"])
def test_a_pickle_is_never_loaded(name: str, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    canary = tmp_path_factory.mktemp("canary") / "sings"
    for step in (2, 4):
        path = saved / f"step-{step:08d}"
        forge(path, name, lambda _: pickle.dumps(Canary(canary)))
        for other in ("adapter_model.bin", "optimizer.pt", "pytorch_model.bin"):
            (path / other).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        checkpoint.newest(saved)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "this canary does not sing"


def test_only_the_newest_are_kept(backbone: Backbone, tmp_path: Path) -> None:
    engine, task = task_at(backbone, 0)
    for step in range(1, 7):
        advance(engine, task, step)
        checkpoint.save(tmp_path, task, GROUND, keep=1 if step > 4 else 3)
        if step == 4:
            assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    assert names(tmp_path) == ["step-00000006"]


def test_damaged_ones_do_not_crowd_out_whole_ones(backbone: Backbone, saved: Path) -> None:
    """The newest is damaged, the run went on from the one before: what it saves now is what must be kept."""
    truncate(saved / "step-00000004" / "adapter.safetensors")
    checkpoint.cut(saved, 2)
    assert names(saved) == ["step-00000002"]
    _, task = task_at(backbone, 3)
    checkpoint.save(saved, task, GROUND, keep=2)
    assert names(saved) == ["step-00000002", "step-00000003"]


def test_a_step_is_saved_once_unless_it_is_damaged(backbone: Backbone, saved: Path) -> None:
    _, task = task_at(backbone, 4)
    path = saved / "step-00000004"
    (path / "mark").touch()
    assert checkpoint.save(saved, task, GROUND, keep=2) == path and (path / "mark").exists()
    truncate(path / "optimizer.safetensors")
    assert checkpoint.save(saved, task, GROUND, keep=2) == path and not (path / "mark").exists()
    found = checkpoint.newest(saved)
    assert found is not None and found.state.step == 4
    assert names(saved) == ["step-00000002", "step-00000004"]


def test_what_a_killed_process_had_no_time_to_drop_is_dropped(backbone: Backbone, saved: Path) -> None:
    """It died between writing the newest and removing the oldest, and there is no later step to save."""
    _, task = task_at(backbone, 4)
    checkpoint.save(saved, task, GROUND, keep=1)
    assert names(saved) == ["step-00000004"]


def test_a_full_disk_leaves_the_older_ones(backbone: Backbone, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, task = task_at(backbone, 5)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(saved, task, GROUND, keep=1)
    assert names(saved) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("ground", "message"),
    [
        (replace(GROUND, base="other"), "other base weights"),
        (replace(GROUND, dtype="bfloat16"), "float32 -> bfloat16"),
        (replace(GROUND, start="other"), "adapter_path has changed"),
        (replace(GROUND, block="fast"), "another block: transformers -> fast"),
    ],
)
def test_other_ground_is_refused(ground: Ground, message: str, backbone: Backbone, saved: Path) -> None:
    _, task = task_at(backbone, 0)
    found = checkpoint.newest(saved)
    assert found is not None
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(task, found, ground)
    assert task.step == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [9, 17, 5, 30, 12, 9]}, "data has changed"),
        ({"r": 8}, "other shapes"),
        ({"targets": ("q_proj",)}, "other shapes"),
    ],
)
def test_other_data_or_shapes_are_refused(
    changes: dict[str, object], message: str, backbone: Backbone, saved: Path
) -> None:
    _, task = task_at(backbone, 0, replace(TRIAL, **changes))  # type: ignore[arg-type]
    found = checkpoint.newest(saved)
    assert found is not None
    before = task.adapter.parameters.values.clone()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(task, found, GROUND)
    assert torch.equal(task.adapter.parameters.values, before)


def test_moments_that_do_not_fit_are_refused(backbone: Backbone, saved: Path) -> None:
    shutil.copy(saved / "step-00000004/adapter.safetensors", saved / "step-00000004/optimizer.safetensors")
    forge(saved / "step-00000004", "optimizer.safetensors", lambda data: data)
    found = checkpoint.newest(saved)
    assert found is not None and found.state.step == 4
    _, task = task_at(backbone, 0)
    with pytest.raises(CheckpointError, match="other shapes"):
        checkpoint.restore(task, found, GROUND)
