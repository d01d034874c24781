"""A task's folder between two processes: what one leaves at any moment, the next understands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from muxtune.engine import task_folder
from muxtune.engine.checkpoint import Ground
from muxtune.engine.task import Task
from muxtune.engine.task_folder import Origin, TaskFolder, holds_run, read_origin, status_of
from muxtune.errors import CheckpointError, StateError
from muxtune.spec.event import EvalResult, StepResult, TaskEvent
from muxtune.spec.job import JobSpec

GROUND = Ground("base", "float32", "")
CREATED = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def origin(max_steps: int = 3) -> Origin:
    return Origin(JobSpec(name="a", datasets=["a.jsonl"], max_steps=max_steps), CREATED, "base", "tiny")


def no_export(task: Task, folder: Path) -> None:
    raise AssertionError


def step(number: int) -> StepResult:
    return StepResult("a", number, 1.0, 1e-3, 0.5, 7, 20, 0.25, number / 3, 0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


@pytest.fixture
def folder(path: Path) -> TaskFolder:
    return TaskFolder.create(path, origin(), GROUND, no_export)


def test_it_says_what_it_holds(path: Path) -> None:
    assert not holds_run(path) and status_of(path) == "queued"
    TaskFolder.create(path, origin(), GROUND, no_export)
    assert holds_run(path) and status_of(path) == "queued"
    assert read_origin(path) == origin()
    with pytest.raises(StateError, match="holds a run already"):
        TaskFolder.create(path, origin(), GROUND, no_export)


def test_a_folder_of_half_written_files_holds_nothing(path: Path) -> None:
    path.mkdir()
    (path / ".job.json.0123abcd.staged").write_text("{")
    assert not holds_run(path)
    TaskFolder.create(path, origin(), GROUND, no_export)
    assert [entry.name for entry in path.iterdir()] == ["job.json"]


def test_a_file_in_its_place_holds_something(path: Path) -> None:
    path.write_text("a file")
    assert holds_run(path)


def test_events_go_where_they_belong(folder: TaskFolder, path: Path) -> None:
    folder.record(TaskEvent("queued", "a", 0, data={"total_steps": 3}))
    folder.record(TaskEvent("started", "a", 0))
    assert status_of(path) == "running"
    folder.record(step(1))
    folder.record(EvalResult("a", 1, 2.0, 0.5, 30))
    folder.record(TaskEvent("warning", "a", 1, "careful"))
    assert status_of(path) == "running"
    folder.record(TaskEvent("failed", "a", 1, "the loss is nan", {"code": "non_finite_loss"}))
    assert json.loads((path / "status.json").read_text()) == {
        "status": "failed",
        "step": 1,
        "message": "the loss is nan",
    }
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["queued", "started", "warning", "failed"]
    assert (events[0]["total_steps"], events[3]["code"]) == (3, "non_finite_loss")
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 2


def test_reopened_it_is_cut_back(folder: TaskFolder, path: Path) -> None:
    for number in (1, 2, 3):
        folder.record(step(number))
        folder.record(TaskEvent("sample", "a", number, data={"prompt": "hi", "reply": f"reply {number}"}))
    folder.record(TaskEvent("completed", "a", 3))
    for name in ("events.jsonl", "samples.jsonl", "metrics.jsonl"):
        with open(path / name, "a") as file:
            file.write('{"kind": "chec')
    TaskFolder.reopen(path, origin(9), GROUND, no_export, step=2)
    assert status_of(path) == "queued" and read_origin(path) == origin(9)
    for name, left in (("events.jsonl", 1), ("samples.jsonl", 2), ("metrics.jsonl", 2)):
        assert len([json.loads(line) for line in (path / name).read_text().splitlines()]) == left


def test_a_job_that_may_go_on_is_never_found_completed(
    folder: TaskFolder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever write the process dies before: completed stands only beside the job that is."""
    folder.record(TaskEvent("completed", "a", 3))
    seen: list[tuple[str, int | None]] = []
    real = task_folder.write_durably

    def watched(target: Path, content: bytes) -> None:
        seen.append((status_of(path), read_origin(path).job.max_steps))
        real(target, content)

    monkeypatch.setattr(task_folder, "write_durably", watched)
    TaskFolder.reopen(path, origin(9), GROUND, no_export, step=3)
    assert seen == [("completed", 3), ("queued", 3)] and status_of(path) == "queued"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"job": {}, "created": "", "base": ""}', '{"job": 3}'])
def test_a_job_that_cannot_be_read(text: str, folder: TaskFolder, path: Path) -> None:
    (path / "job.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot read the job of this run") as caught:
        read_origin(path)
    assert caught.value.where == str(path / "job.json")


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: folder.record(step(1)),
        lambda folder: folder.record(TaskEvent("started", "a", 0)),
        lambda folder: TaskFolder.reopen(folder.path, origin(), GROUND, no_export, step=0),
    ],
    ids=["metrics", "events", "reopen"],
)
def test_a_disk_that_refuses_is_said(use: Callable[[TaskFolder], object], folder: TaskFolder, path: Path) -> None:
    for entry in path.iterdir():
        entry.unlink()
    os.rmdir(path)
    path.write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written.*--resume") as caught:
        use(folder)
    assert caught.value.where == str(path)
