"""Runs of which something has been lost or damaged: made again from what is left, or refused by name, and alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muxtune.engine.training import TrainingRun
from muxtune.errors import CheckpointError, MuxTuneError
from muxtune.spec.event import RunEvent, TaskEvent
from muxtune.spec.run import RunSpec
from tests.engine.runs import bits, job, losses_of, run_of, status, steps_of, stop_after, told, train

Make = Callable[..., RunSpec]
SHORT: dict[str, Any] = {"like": "text", "max_steps": 3, "num_train_epochs": 1, "save_steps": 1}


@pytest.fixture
def make(tiny_llama: Path, disk: Path, data: Path) -> Make:
    """A run of short jobs, by name and with changes, into the test's own folder."""

    def make(jobs: dict[str, dict[str, Any]]) -> RunSpec:
        return run_of(tiny_llama, disk / "run", [job(data, name, **SHORT | changes) for name, changes in jobs.items()])

    return make


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files with their times of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def warnings_of(events: list[RunEvent], name: str) -> list[str]:
    found = [event for event in events if isinstance(event, TaskEvent) and event.kind == "warning"]
    return [event.message for event in found if event.task == name]


STATUSES = {
    "empty": "",
    "text": "x",
    "list": "[]",
    "nothing": "{}",
    "other": '{"status": "asleep"}',
    "deep": "[" * 9**5,
}


@pytest.mark.parametrize("text", STATUSES.values(), ids=STATUSES)
def test_a_status_that_cannot_be_read_is_made_again(text: str, make: Make, cache: Path, disk: Path) -> None:
    """From the newest checkpoint, of a finished job and of one that is not."""
    jobs: dict[str, dict[str, Any]] = {"done": {"max_steps": 2}, "half": {}}
    train(make(jobs), cache_dir=cache, stop=stop_after(2))
    before = bits(disk / "run/done")
    for name in jobs:
        (disk / "run" / name / "status.json").write_text(text)
    events = train(make(jobs), cache_dir=cache, resume=True)
    for name, steps in (("done", []), ("half", [3])):
        assert steps_of(events, name) == steps and status(disk / "run" / name) == "completed"
        (warning,) = warnings_of(events, name)
        assert warning.startswith("status.json is damaged (")
    assert bits(disk / "run/done") == before


def test_a_run_that_nothing_can_make_again_is_refused_by_name_and_alone(make: Make, cache: Path, disk: Path) -> None:
    """Its status is damaged and its checkpoints are gone, or its job cannot be read."""
    run = make({"a": {}, "lost": {}, "unread": {}})
    train(run, cache_dir=cache, stop=stop_after(2))
    (disk / "run/lost/status.json").write_text("")
    shutil.rmtree(disk / "run/lost/checkpoints")
    (disk / "run/unread/job.json").write_text("[" * 100_000)
    before = contents(disk / "run")
    with pytest.raises(CheckpointError) as caught:
        train(run, cache_dir=cache, resume=True)
    assert f"{disk}/run/lost: status.json is damaged" in str(caught.value)
    assert f"{disk}/run/unread/job.json: cannot read the job" in str(caught.value)
    assert contents(disk / "run") == before
    training = TrainingRun(run, resume=True, keep_going=True, cache_dir=cache)
    events = list(training.events())
    assert steps_of(events, "a") == [3] and [failure.job.name for failure in training.failures] == ["lost", "unread"]
    failed = {event.task: event.step for event in events if isinstance(event, TaskEvent) and event.kind == "failed"}
    assert failed == {"lost": 0, "unread": 2}
    after = contents(disk / "run")
    assert all(after[path] == found for path, found in before.items() if "/a/" not in path)


ADAPTER_DAMAGE: list[Callable[[Path], object]] = [
    lambda folder: (folder / "adapter_model.safetensors").unlink(),
    lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""),
    lambda folder: flip(folder / "adapter_model.safetensors"),
    lambda folder: (folder / "adapter_config.json").unlink(),
    lambda folder: (folder / "adapter_config.json").write_text("{"),
    lambda folder: (folder / "training_manifest.json").unlink(),
    lambda folder: (folder / "tokenizer.json").unlink(),
]


def flip(path: Path) -> None:
    """Another last bit, which only a hash can see."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", ADAPTER_DAMAGE, ids=[str(number) for number in range(len(ADAPTER_DAMAGE))])
def test_an_adapter_that_is_gone_or_damaged_is_written_again(
    damage: Callable[[Path], object], make: Make, cache: Path, disk: Path
) -> None:
    run, folder = make({"a": {}, "b": {}}), disk / "run/a"
    train(run, cache_dir=cache)
    before, names = bits(folder), {path.name for path in folder.iterdir()}
    (folder / "README.md").write_text("my own words")
    assert told(train(run, cache_dir=cache, resume=True), "a") == ["completed"]
    assert (folder / "README.md").read_text() == "my own words"
    damage(folder)
    events = train(run, cache_dir=cache, resume=True)
    assert told(events, "a") == ["warning", "completed"] and not steps_of(events, "a")
    assert "made again from the newest checkpoint" in warnings_of(events, "a")[0]
    assert bits(folder) == before and {path.name for path in folder.iterdir()} == names
    assert told(events, "b") == ["completed"]
    assert told(train(run, cache_dir=cache, resume=True), "a") == ["completed"]


def test_an_adapter_that_no_checkpoint_can_write_again(make: Make, cache: Path, disk: Path) -> None:
    run = make({"a": {}, "b": {}})
    train(run, cache_dir=cache)
    for name in ("a", "b"):
        shutil.rmtree(disk / "run" / name / "checkpoints")
    (disk / "run/a/adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing, and no checkpoint") as caught:
        train(run, cache_dir=cache, resume=True)
    assert caught.value.where == str(disk / "run/a")
    events = train(run, cache_dir=cache, resume=True, keep_going=True)
    assert told(events, "a") == ["failed"] and told(events, "b") == ["completed"]


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_again(make: Make, cache: Path, disk: Path) -> None:
    run = make({"a": {}, "b": {}})
    train(run, cache_dir=cache, stop=stop_after(2))
    shutil.rmtree(disk / "run/a/checkpoints")
    events = train(run, cache_dir=cache, resume=True)
    assert steps_of(events, "a") == [1, 2, 3] and steps_of(events, "b") == [3]
    assert warnings_of(events, "a") == [
        "none of its checkpoints is left: it starts again at step 0, though 2 steps were done"
    ]
    assert not warnings_of(events, "b")
    assert bits(disk / "run/a") == {**bits(disk / "run/b")}


def test_a_folder_that_cannot_be_reopened_fails_alone(make: Make, cache: Path, disk: Path) -> None:
    run = make({"a": {}, "b": {}})
    train(run, cache_dir=cache, stop=stop_after(1))
    (disk / "run/a/metrics.csv").unlink()
    (disk / "run/a/metrics.csv").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        train(run, cache_dir=cache, resume=True)
    events = train(run, cache_dir=cache, resume=True, keep_going=True)
    assert told(events, "a") == ["failed"] and steps_of(events, "b") == [2, 3]


def test_a_job_whose_data_are_gone_fails_where_it_stood(make: Make, data: Path, cache: Path, disk: Path) -> None:
    copy = Path(shutil.copy(data / "text.jsonl", disk / "mine.jsonl"))
    run = make({"a": {"datasets": [copy]}, "b": {}})
    train(run, cache_dir=cache, stop=stop_after(2))
    copy.unlink()
    with pytest.raises(MuxTuneError) as caught:
        train(run, cache_dir=cache, resume=True)
    assert caught.value.where == f"jobs.a: {copy}"
    events = train(run, cache_dir=cache, resume=True, keep_going=True)
    (failed,) = [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]
    assert (failed.task, failed.step, failed.message) == ("a", 2, f"{copy}: no such file")


def test_what_is_known_of_earlier_jobs_is_told(make: Make, cache: Path) -> None:
    run = make({"done": {"max_steps": 1}, "half": {}})
    first = train(run, cache_dir=cache, stop=stop_after(2))
    events = train(run, cache_dir=cache, resume=True, stop=lambda: True)
    (done,) = [event for event in events if event.task == "done"]
    assert isinstance(done, TaskEvent) and done.step == 1
    assert done.data == {"earlier": True, "total_steps": 1, "loss": losses_of(first, "done")[-1]}
    queued = next(event for event in events if event.task == "half")
    assert isinstance(queued, TaskEvent) and (queued.kind, queued.step) == ("queued", 2)
    assert queued.data == {"total_steps": 3, "loss": losses_of(first, "half")[-1]}
