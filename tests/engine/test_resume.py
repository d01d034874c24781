"""What is resumed comes out as if nothing had happened: the same bits, whatever watched, joined or failed beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.engine.task_folder import read_origin
from muxtune.errors import CheckpointError
from muxtune.models.cache import file_sha256
from muxtune.spec.event import TaskEvent
from muxtune.spec.run import RunSpec
from tests.engine.build import Trial, attach, backbone_of, outcome
from tests.engine.runs import (
    JOBS,
    STEPS,
    assert_same_result,
    bits,
    job,
    losses_of,
    metrics,
    newest_step,
    run_of,
    scratch,
    status,
    steps_of,
    stop_after,
    told,
    train,
    whole_checkpoints,
)

Make = Callable[..., RunSpec]


@pytest.fixture
def make(tiny_llama: Path, disk: Path) -> Make:
    """A run of these jobs into the test's own folder."""
    return lambda *jobs, **keys: run_of(tiny_llama, disk / "run", jobs, **keys)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, data: Path, cache: Path) -> Iterator[Path]:
    """The output folder of a run of JOBS that nothing happened to."""
    with scratch() as folder:
        train(run_of(tiny_llama, folder, [job(data, name) for name in JOBS]), cache_dir=cache)
        yield folder


@pytest.mark.parametrize("rounds", [1, 7, 10])
def test_stopped_and_resumed(rounds: int, make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path) -> None:
    run = make(*(job(data, name) for name in JOBS))
    first = train(run, cache_dir=cache, stop=stop_after(rounds))
    for name, total in STEPS.items():
        assert steps_of(first, name) == list(range(1, min(rounds, total) + 1))
        assert newest_step(disk / "run" / name) == min(rounds, total)
        assert status(disk / "run" / name) == ("queued" if rounds < total else "completed")
    second = train(run, cache_dir=cache, resume=True)
    for name, total in STEPS.items():
        assert steps_of(second, name) == list(range(rounds + 1, total + 1))
        assert told(second, name) == (["resumed", "completed"] if rounds < total else ["completed"])
        assert_same_training(disk / "run" / name, undisturbed / name)


@pytest.mark.parametrize("policies", [("muxtune", "sequential"), ("sequential", "muxtune"), ("fuse-all", "padded")])
def test_who_runs_with_whom_may_change_when_a_run_is_resumed(
    policies: tuple[str, str], make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path
) -> None:
    jobs = [job(data, name) for name in JOBS]
    train(make(*jobs, policy=policies[0]), cache_dir=cache, stop=stop_after(4))
    train(make(*jobs, policy=policies[1]), cache_dir=cache, resume=True)
    for name in JOBS:
        assert_same_training(disk / "run" / name, undisturbed / name)


def test_a_run_goes_on_with_the_block_that_it_began_with(
    make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path
) -> None:
    """Whatever `auto` would choose today; one that is asked for is refused where it is another."""
    jobs = [job(data, name) for name in JOBS]
    for name in JOBS:
        assert read_origin(undisturbed / name).block == "fast"
    train(run_of(Path(make(*jobs).base_model), disk / "whole", jobs, block="transformers"), cache_dir=cache)
    train(make(*jobs, block="transformers"), cache_dir=cache, stop=stop_after(4))
    with pytest.raises(CheckpointError, match=r"another block: transformers -> fast.*block to transformers"):
        train(make(*jobs, block="fast"), cache_dir=cache, resume=True)
    train(make(*jobs), cache_dir=cache, resume=True)
    for name in JOBS:
        assert read_origin(disk / "run" / name).block == "transformers"
        assert_same_training(disk / "run" / name, disk / "whole" / name)
        assert bits(disk / "run" / name) != bits(undisturbed / name)


def test_jobs_that_began_with_different_blocks_do_not_go_on_together(
    make: Make, data: Path, cache: Path, disk: Path
) -> None:
    train(make(job(data, "sql")), cache_dir=cache, stop=stop_after(1))
    train(make(job(data, "text"), block="transformers"), cache_dir=cache, stop=stop_after(1))
    with pytest.raises(CheckpointError, match="another block: transformers -> fast"):
        train(make(job(data, "sql"), job(data, "text")), cache_dir=cache, resume=True)
    train(make(job(data, "sql")), cache_dir=cache, resume=True)
    train(make(job(data, "sql"), job(data, "text")), cache_dir=cache, resume=True)  # what is finished has no say
    assert [status(disk / "run" / name) for name in ("sql", "text")] == ["completed"] * 2


def test_a_run_from_before_there_was_a_choice_has_had_transformers_block(
    make: Make, data: Path, cache: Path, disk: Path
) -> None:
    train(make(job(data, "sql"), block="transformers"), cache_dir=cache, stop=stop_after(2))
    for path in (disk / "run/sql/job.json", disk / "run/sql/checkpoints/step-00000002/state.json"):
        stored = json.loads(path.read_text())
        del (stored if path.name == "job.json" else stored["ground"])["block"]
        path.write_text(json.dumps(stored))
    manifest = path.with_name("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {path.name: file_sha256(path)}))
    assert steps_of(train(make(job(data, "sql")), cache_dir=cache, resume=True), "sql")[0] == 3
    assert read_origin(disk / "run/sql").block == "transformers"


def assert_same_training(one: Path, other: Path) -> None:
    """As `assert_same_result`, where checkpoints were saved at other steps."""
    assert status(one) == status(other) == "completed"
    assert bits(one) == bits(other) and len(bits(one)) == 5
    assert metrics(one) == metrics(other)


def test_stopped_before_the_first_step(make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path) -> None:
    run = make(job(data, "sql"))
    assert train(run, cache_dir=cache, stop=lambda: True)[-1].step == 0
    assert status(disk / "run/sql") == "queued"
    train(run, cache_dir=cache, resume=True)
    assert_same_training(disk / "run/sql", undisturbed / "sql")


def test_the_newest_is_damaged(make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path) -> None:
    run = make(*(job(data, name) for name in JOBS))
    train(run, cache_dir=cache, stop=stop_after(9))
    assert whole_checkpoints(disk / "run/sql") == [8, 9]
    tensors = disk / "run/sql/checkpoints/step-00000009/optimizer.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    events = train(run, cache_dir=cache, resume=True)
    assert steps_of(events, "sql") == [9, 10, 11, 12]
    (warning,) = (event for event in events if isinstance(event, TaskEvent) and event.kind == "warning")
    assert (warning.task, warning.step) == ("sql", 8)
    assert "step-00000009" in warning.message and "optimizer.safetensors" in warning.message
    for name in JOBS:
        assert_same_training(disk / "run" / name, undisturbed / name)
    assert whole_checkpoints(disk / "run/sql") == [8, 12]


def test_what_watches_and_stores_changes_no_bit(
    make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path
) -> None:
    """Saving, evaluation, logging at other steps, another policy, another split of the batch, and a job that joins."""
    changes: dict[str, dict[str, Any]] = {
        "sql": {"save_steps": 5, "logging_steps": 1, "validation": {"path": "held-out.jsonl"}, "eval_steps": 1},
        "chat": {
            "save_steps": 1,
            "validation": None,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1,
        },
        "text": {"save_total_limit": 5},
    }
    train(make(*(job(data, name) for name in JOBS)), cache_dir=cache, stop=stop_after(4))
    jobs = [job(data, name, **changed) for name, changed in changes.items()]
    new = job(data, "new", like="sql", seed=3)
    events = train(make(new, *jobs, policy="sequential"), cache_dir=cache, resume=True)
    assert told(events, "new") == ["started", "completed"] and told(events, "sql") == ["resumed", "completed"]
    for name in JOBS:
        one, other = bits(disk / "run" / name), bits(undisturbed / name)
        assert one == other and len(one) == 5
        assert trained(disk / "run" / name) == trained(undisturbed / name)
    assert bits(disk / "run/new") != bits(disk / "run/sql")


def trained(folder: Path) -> list[dict[str, object]]:
    return [dict(row) for row in metrics(folder) if "train/loss" in row]


def test_alone_is_with_others(make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path) -> None:
    train(make(job(data, "chat")), cache_dir=cache)
    assert_same_result(disk / "run/chat", undisturbed / "chat")


LONGER = [
    ("text", {"num_train_epochs": 2}, {"num_train_epochs": 3}, 6),
    ("chat", {"max_steps": 5, "lr_scheduler_type": "constant"}, {"max_steps": 13}, 5),
    ("sql", {"max_steps": 6, "lr_scheduler_type": "constant_with_warmup"}, {"max_steps": 12}, 6),
]


@pytest.mark.parametrize(("name", "short", "longer", "done"), LONGER, ids=[case[0] for case in LONGER])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "stopped"])
def test_more_steps_are_as_if_asked_for_from_the_start(
    finished: bool, name: str, short: dict[str, Any], longer: dict[str, Any], done: int,
    tiny_llama: Path, data: Path, cache: Path, disk: Path,
) -> None:  # fmt: skip
    def run(output: str, keys: dict[str, Any]) -> RunSpec:
        return run_of(tiny_llama, disk / output, [job(data, name, **keys)])

    train(run("run", short), cache_dir=cache, stop=(lambda: False) if finished else stop_after(done - 1))
    assert status(disk / "run" / name) == ("completed" if finished else "queued")
    events = train(run("run", short | longer), cache_dir=cache, resume=True)
    assert steps_of(events, name)[0] == (done if finished else done - 1) + 1
    train(run("whole", short | longer), cache_dir=cache)
    one, other = disk / "run" / name, disk / "whole" / name
    assert bits(one) == bits(other) and trained(one) == trained(other)
    assert status(one) == "completed"


def test_growth_is_not_lost_when_the_process_dies_as_it_reopens(
    tiny_llama: Path, data: Path, cache: Path, disk: Path
) -> None:
    """The folder says completed, of fewer steps than the job in it may now take: it must not be taken for finished."""
    short, longer = (job(data, "text", max_steps=steps) for steps in (2, 4))
    train(run_of(tiny_llama, disk / "run", [short]), cache_dir=cache)
    stopped = train(run_of(tiny_llama, disk / "run", [longer]), cache_dir=cache, resume=True, stop=lambda: True)
    assert not steps_of(stopped, "text")
    assert steps_of(train(run_of(tiny_llama, disk / "run", [longer]), cache_dir=cache, resume=True), "text") == [3, 4]


DIVERGING = {"learning_rate": 1e30, "save_steps": 1}


def test_a_task_that_diverges_stops_alone(make: Make, data: Path, cache: Path, disk: Path, undisturbed: Path) -> None:
    bad = job(data, "bad", like="sql", lr_scheduler_type="constant", warmup_steps=0, **DIVERGING)
    run = make(bad, *(job(data, name) for name in JOBS))
    events = train(run, cache_dir=cache)
    failed = failure(events)
    assert (failed.task, failed.data["code"]) == ("bad", "non_finite_loss")
    done = steps_of(events, "bad")
    assert done == list(range(1, failed.step + 1)) and 1 <= failed.step < STEPS["sql"], "it stops at once"
    assert status(disk / "run/bad") == "failed"
    assert newest_step(disk / "run/bad") == failed.step and not (disk / "run/bad/adapter_config.json").exists()
    for name in JOBS:
        assert_same_result(disk / "run" / name, undisturbed / name)
    before = {path: path.stat().st_mtime_ns for path in (disk / "run/sql").rglob("*")}

    # Resumed, it is tried once more from its last good checkpoint, fails as before, and no one else is touched.
    again = train(run, cache_dir=cache, resume=True)
    assert told(again, "bad") == ["resumed", "failed"] and not steps_of(again, "bad")
    assert failure(again) == failed
    assert all(told(again, name) == ["completed"] and not steps_of(again, name) for name in JOBS)
    assert {path: path.stat().st_mtime_ns for path in (disk / "run/sql").rglob("*")} == before
    assert [row["train/global_step"] for row in metrics(disk / "run/bad")] == done


def failure(events: list[Any]) -> TaskEvent:
    (failed,) = (event for event in events if isinstance(event, TaskEvent) and event.kind == "failed")
    return failed


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    make: Make, data: Path, cache: Path, disk: Path
) -> None:
    """The last step overflows fp32: no later loss would show it, and a peft folder with infinities is no adapter."""
    keys: dict[str, Any] = {"learning_rate": 1e39, "max_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    events = train(make(job(data, "bad", like="sql", **keys), job(data, "text")), cache_dir=cache)
    failed = failure(events)
    assert (failed.task, failed.step, failed.data["code"]) == ("bad", 1, "non_finite_weights")
    assert not whole_checkpoints(disk / "run/bad") and not (disk / "run/bad/adapter_config.json").exists()
    assert status(disk / "run/text") == "completed"


def test_losses_are_those_of_the_adapter_it_goes_on_from(make: Make, data: Path, cache: Path) -> None:
    """A resumed task's first loss is that of its trained adapter, and not of a fresh one."""
    whole = losses_of(train(make(job(data, "chat")), cache_dir=cache), "chat")
    assert whole[6] < whole[0] - 0.5, "this data is learned fast, or the test below says nothing"


def test_jobs_are_not_the_same(undisturbed: Path) -> None:
    """Different jobs come to different bits, or the comparisons above are of nothing."""
    assert len({tuple(sorted(bits(undisturbed / name).items())) for name in JOBS}) == len(JOBS)


def test_an_infinite_gradient_is_never_applied() -> None:
    """The loss was finite; neither weights nor moments take a trace of the step."""
    engine = Engine(backbone_of(layers=1))
    task = attach(engine, Trial("a", lengths=[9, 7], batch=2))
    engine.forward_backward({task: task.data.train})
    assert engine.optim_step(task).error is None
    before = outcome(task, [])
    engine.forward_backward({task: task.data.train})
    task.adapter.parameters.gradient[3] = float("inf")
    refused = engine.optim_step(task)
    assert (refused.error or "").startswith("non_finite_gradient: ") and refused.step == task.step == 1
    after = outcome(task, [])
    assert torch.equal(after.values, before.values)
    assert all(torch.equal(after.moments[name], before.moments[name]) for name in before.moments)
    assert not task.adapter.parameters.gradient.any(), "the next step starts from nothing"
