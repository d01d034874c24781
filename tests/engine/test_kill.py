"""Killed at any moment, a run goes on as if it had not been: real processes, SIGKILL, and the bits compared."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from muxtune.spec.run import RunSpec
from tests.engine.runs import (
    DIED,
    JOBS,
    STEPS,
    Ended,
    Trainer,
    assert_same_result,
    job,
    newest_step,
    run_of,
    scratch,
)

SAVED_EVERY = {"sql": 4, "chat": 3, "text": 2}  # steps


@dataclass(frozen=True, slots=True)
class Undisturbed:
    model: Path
    data: Path
    output: Path
    ended: Ended

    def run(self, output: Path) -> RunSpec:
        return run_of(self.model, output, [job(self.data, name) for name in JOBS])


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, data: Path, trainer: Trainer) -> Iterator[Undisturbed]:
    with scratch() as folder:
        found = Undisturbed(tiny_llama, data, folder / "run", Ended(0, "", 0, {}))
        ended = trainer.run(found.run(folder / "run"))
        assert (ended.code, ended.error) == (0, "")
        assert {name: len(steps) for name, steps in ended.steps.items()} == STEPS
        yield Undisturbed(tiny_llama, data, folder / "run", ended)


def left_at(output: Path, died: Ended | None = None) -> dict[str, int]:
    """The step from which each task has to go on: at least the last one after which it was saved before it died."""
    found = {name: newest_step(output / name) for name in JOBS}
    for name, steps in (died.steps if died else {}).items():
        executed = steps[-1]["step"]
        assert found[name] >= (executed - 1) // SAVED_EVERY[name] * SAVED_EVERY[name], f"{name} has lost a checkpoint"
    return found


def assert_goes_on(ended: Ended, begun: Mapping[str, int], undisturbed: Undisturbed) -> None:
    """It executed steps c+1, c+2, ... and no other, on the same examples with the same losses; perhaps not all."""
    for name, steps in ended.steps.items():
        expected = undisturbed.ended.steps[name][begun[name] :]
        assert steps == expected[: len(steps)], name


def assert_finishes(ended: Ended, begun: Mapping[str, int], output: Path, undisturbed: Undisturbed) -> None:
    assert (ended.code, ended.error) == (0, "")
    assert_goes_on(ended, begun, undisturbed)
    for name in JOBS:
        assert len(ended.steps.get(name, ())) == STEPS[name] - begun[name]
        assert_same_result(output / name, undisturbed.output / name)
    assert not [path for path in output.rglob("*") if path.name.endswith(".staged")]


# name: (audit event, paths it concerns, the how manieth such). The process dies before that operation.
MOMENTS = {
    "before any job is there": ("os.rename", r"/sql/\.job\.json", 1),
    "between two jobs": ("os.mkdir", r"/chat$", 1),
    "the staging folder is made": ("os.mkdir", r"sql/checkpoints/\.step-00000008", 1),
    "tensors are written, the state is not": ("open", r"sql/checkpoints/\.step-00000008.*/state\.json", 1),
    "the manifest is not": ("open", r"chat/checkpoints/\.step-00000009.*/manifest\.json", 1),
    "all is written, the rename is not": ("os.rename", r"sql/checkpoints/\.step-00000008", 1),
    "renamed, the older one still there": ("os.rename", r"chat/checkpoints/step-00000006 ", 1),
    "the last is saved, the oldest still there": ("os.rename", r"text/checkpoints/step-00000006 ", 1),
    "in the middle of removing the older one": ("shutil.rmtree", r"chat/checkpoints/\.step-00000006", 1),
    "in the middle of a step's metrics": ("open", r"text/metrics\.csv", 7),
    "metrics written, the checkpoint not begun": ("os.mkdir", r"text/checkpoints/\.step-00000006", 1),
    "in an evaluation's metrics": ("open", r"chat/metrics\.csv", 5),
    "a status half-replaced": ("os.rename", r"text/\.status\.json", 2),
    "the adapter is being written": ("open", r"/\.sql\..*/adapter_config\.json", 1),
    "the adapter is half moved": ("os.rename", r"/sql/training_manifest\.json", 1),
    "the adapter is there, the status is not": ("open", r"sql/\.status\.json", 2),
}
IN_CI = {
    "between two jobs",
    "the manifest is not",
    "all is written, the rename is not",
    "in the middle of removing the older one",
    "in the middle of a step's metrics",
    "the adapter is half moved",
}


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.full) for name in MOMENTS]
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    moment: str, undisturbed: Undisturbed, trainer: Trainer, disk: Path
) -> None:
    operation, path, nth = MOMENTS[moment]
    run = undisturbed.run(disk / "run")
    killed = trainer.run(run, operation=operation, path=path, nth=nth)
    assert killed.code == DIED
    begun = left_at(disk / "run", killed)
    assert_finishes(trainer.run(run, resume=True), begun, disk / "run", undisturbed)


# The kernel kills the process when a file has grown by so many bytes: in the middle of a write.
HALVES = {
    "half a line of metrics": ("open", r"chat/metrics\.jsonl", 9, 100),
    "half the tensors": ("os.mkdir", r"sql/checkpoints/\.step-00000008", 1, 9_000),
    "half the moments": ("os.mkdir", r"sql/checkpoints/\.step-00000008", 1, 30_000),
}


@pytest.mark.parametrize(
    "half", [pytest.param(name, marks=() if "line" in name else pytest.mark.full) for name in HALVES]
)
def test_killed_in_the_middle_of_a_write(half: str, undisturbed: Undisturbed, trainer: Trainer, disk: Path) -> None:
    operation, path, nth, file_bytes = HALVES[half]
    run = undisturbed.run(disk / "run")
    killed = trainer.run(run, operation=operation, path=path, nth=nth, file_bytes=file_bytes, fatal=True)
    assert killed.code == -signal.SIGXFSZ
    if "line" in half:
        assert not (disk / "run/chat/metrics.jsonl").read_bytes().endswith(b"\n")
        with open(disk / "run/chat/events.jsonl", "a") as file:
            file.write('{"kind": "chec')
    else:
        (staged,) = (disk / "run/sql/checkpoints").glob(".step-00000008*")
        assert not (staged / "manifest.json").exists()
    begun = left_at(disk / "run")
    assert begun == {"sql": 4, "chat": 6, "text": 6}
    assert_finishes(trainer.run(run, resume=True), begun, disk / "run", undisturbed)


def test_killed_again_and_again(undisturbed: Undisturbed, trainer: Trainer, disk: Path) -> None:
    """While it reopens its folders, too, and with tasks that stand at different steps."""
    run = undisturbed.run(disk / "run")
    kills = [
        ("open", r"chat/checkpoints/\.step-00000006.*/manifest\.json", 1),
        ("os.rename", r"text/\.metrics\.csv", 1),
        ("os.rename", r"sql/\.job\.json", 1),
        ("os.rename", r"sql/checkpoints/\.step-00000008", 1),
    ]
    for operation, path, nth in kills:
        begun = left_at(disk / "run")
        ended = trainer.run(run, resume=(disk / "run").exists(), operation=operation, path=path, nth=nth)
        assert ended.code == DIED
        assert_goes_on(ended, begun, undisturbed)
        left_at(disk / "run", ended)
    begun = left_at(disk / "run")
    assert begun == {"sql": 4, "chat": 6, "text": 6}
    assert_finishes(trainer.run(run, resume=True), begun, disk / "run", undisturbed)


def test_a_second_process_is_refused_and_the_first_does_not_notice(
    undisturbed: Undisturbed, trainer: Trainer, disk: Path
) -> None:
    run = undisturbed.run(disk / "run")
    flag = disk / "go on"
    first = trainer.start(run, hold=str(flag))
    wait_for(Path(f"{flag}.reached"))
    for order in ({"resume": True}, {"overwrite": True}):
        refused = trainer.run(run, **order)
        assert refused.error.startswith("StateError") and "another process" in refused.error
        assert not refused.steps
    flag.touch()
    assert_finishes(first.wait(), dict.fromkeys(JOBS, 0), disk / "run", undisturbed)


def test_a_killed_process_holds_no_lock(undisturbed: Undisturbed, trainer: Trainer, disk: Path) -> None:
    run = undisturbed.run(disk / "run")
    flag = disk / "never"
    first = trainer.start(run, hold=str(flag))
    wait_for(Path(f"{flag}.reached"))
    first.kill()
    assert first.wait().code == DIED  # a signal is not yet a death
    begun = left_at(disk / "run")
    assert_finishes(trainer.run(run, resume=True), begun, disk / "run", undisturbed)


# When the disk is full, and by how much a file may still grow.
FULL = (
    ("os.mkdir", r"sql/checkpoints/\.step-00000008", 9_000),  # half the tensors
    ("open", r"sql/checkpoints/\.step-00000008.*/state\.json", 20),
    ("open", r"sql/metrics\.csv", 30),
    ("open", r"sql/\.status\.json", 0),
)


def test_a_full_disk_is_said_and_costs_no_checkpoint(undisturbed: Undisturbed, trainer: Trainer, disk: Path) -> None:
    run = undisturbed.run(disk / "run")
    for full in FULL:
        operation, path, file_bytes = full
        before = left_at(disk / "run") if (disk / "run").exists() else dict.fromkeys(JOBS, 0)
        ended = trainer.run(run, resume=any(before.values()), operation=operation, path=path, file_bytes=file_bytes)
        assert ended.code == 0 and ended.error.startswith("CheckpointError")
        assert "File too large" in ended.error and "free some space" in ended.error
        assert f"{disk}/run/{path.partition('/')[0]}" in ended.error
        begun = left_at(disk / "run", ended)
        assert begun["sql"] == 4 and all(begun[name] >= before[name] for name in JOBS)
        assert not list((disk / "run").rglob("*.staged"))
    assert_finishes(trainer.run(run, resume=True), begun, disk / "run", undisturbed)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_kills(seed: int, undisturbed: Undisturbed, trainer: Trainer, disk: Path) -> None:
    """Thirty deaths each: at a random file operation, at a random time, or half-way through a write."""
    random_ = random.Random(seed)
    deaths = runs = 0
    while deaths < 30:
        run = undisturbed.run(disk / f"run-{runs}")
        runs += 1
        for _ in range(8):
            output = Path(run.output_dir)
            begun = left_at(output)
            ended = run_to_a_random_death(run, random_, trainer, undisturbed.ended.operations)
            if ended.code == 0:
                assert_finishes(ended, begun, output, undisturbed)
                break
            deaths += 1
            assert_goes_on(ended, begun, undisturbed)
            left_at(output, ended)
        else:
            begun = left_at(output)
            assert_finishes(trainer.run(run, resume=True), begun, output, undisturbed)


def run_to_a_random_death(run: RunSpec, random_: random.Random, trainer: Trainer, operations: int) -> Ended:
    order: dict[str, object] = {"resume": True}
    kind = random_.choice(("operation", "time", "write"))
    if kind == "time":
        child = trainer.start(run, **order)
        time.sleep(random_.uniform(0.1, 2.5))
        child.kill()
        return child.wait()
    order |= {"operation": ".*", "nth": random_.randint(1, operations)}
    if kind == "write":
        order |= {"file_bytes": random_.randint(0, 40_000), "fatal": True}
    return trainer.run(run, **order)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1, 6))
def test_killed_before_every_single_file_operation(
    first: int, undisturbed: Undisturbed, trainer: Trainer, disk: Path
) -> None:
    for nth in range(first, undisturbed.ended.operations + 1, 5):
        run = undisturbed.run(disk / f"run-{nth}")
        killed = trainer.run(run, operation=".*", nth=nth)
        assert killed.code == DIED
        begun = left_at(disk / f"run-{nth}", killed)
        assert_finishes(trainer.run(run, resume=True), begun, disk / f"run-{nth}", undisturbed)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)
