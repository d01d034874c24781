"""Whole runs of bottleneck adapters and the selective types with their defaults: train, stop, resume, sample, go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muxtune.engine.local import LocalEngine
from muxtune.engine.training import TrainingRun
from muxtune.errors import AdapterError
from muxtune.spec.job import JobSpec
from tests.engine.runs import assert_same_result, metrics, newest_step, run_of, status
from tests.tiny import tiny_folder

NAMES = ("houlsby", "pfeiffer", "parallel", "bitfit", "ln_tuning", "shira")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


def _jobs(data: Path) -> list[JobSpec]:
    """Each type by its name alone, with its own default learning rate."""
    return [_job(data, name, peft=name, max_steps=6, save_steps=2) for name in NAMES]


def _job(data: Path, name: str, **keys: Any) -> JobSpec:
    return JobSpec(name=name, datasets=[str(data / "sql.jsonl")], per_device_train_batch_size=2, **{"seed": 7, **keys})


def _train(model: Path, output: Path, jobs: list[JobSpec], *, resume: bool = False, rounds: int | None = None) -> None:
    for _ in TrainingRun(run_of(model, output, jobs), resume=resume, stop=_after(rounds)).events():
        pass


def _after(rounds: int | None) -> Callable[[], bool]:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return rounds is not None and asked > rounds

    return stop


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run of them all."""
    output = tmp_path_factory.mktemp("whole")
    _train(model, output, _jobs(data))
    return output


def test_each_learns_with_its_defaults(whole: Path, data: Path) -> None:
    rates = {made.name: made.peft.default_learning_rate for made in _jobs(data)}
    for name in NAMES:
        assert status(whole / name) == "completed"
        rows = [row for row in metrics(whole / name) if "train/loss" in row]
        assert rows[0]["train/learning_rate"] == rates[name]
        assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_stopped_and_resumed_is_undisturbed_bit_for_bit(whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    _train(model, tmp_path, _jobs(data), rounds=3)
    assert all(0 < newest_step(tmp_path / name) < 6 for name in NAMES)
    _train(model, tmp_path, _jobs(data), resume=True)
    for name in NAMES:
        assert_same_result(whole / name, tmp_path / name)


def test_alone_is_together_bit_for_bit(whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    for made in _jobs(data):
        _train(model, tmp_path, [made])
        assert_same_result(whole / made.name, tmp_path / made.name)


def test_a_finished_folder_and_a_checkpoint_answer_alike(whole: Path, model: Path) -> None:
    engine = LocalEngine(str(model))
    for name in NAMES:
        finished = engine.load(whole / name, name=f"{name}-finished")
        newest = engine.load(whole / name / "checkpoints" / "step-00000006", name=f"{name}-newest")
        assert torch.equal(finished.adapter.parameters.values, newest.adapter.parameters.values)
    prompt = "How many users are above 40? "
    requests = [(f"{name}-{kind}", prompt) for name in NAMES for kind in ("finished", "newest")]
    replies = engine.generate([*requests, (None, prompt)], max_new_tokens=12)
    assert replies[0:-1:2] == replies[1:-1:2]
    assert [engine.sample(prompt, task=f"{name}-finished", max_new_tokens=12) for name in NAMES] == replies[0:-1:2]


def test_a_job_may_start_from_a_folder_of_its_own_type_only(
    whole: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(str(model))
    for name in NAMES:
        again = _job(data, f"{name}-again", peft=name, max_steps=2, adapter_path=str(whole / name), seed=11)
        task = engine.attach(again)
        there = engine.load(whole / name, name=f"{name}-there")
        assert all(torch.equal(value, there.adapter.state()[key]) for key, value in task.adapter.state().items())
        other = "lora" if name != "shira" else "bitfit"
        with pytest.raises(AdapterError, match="another adapter"):
            engine.attach(_job(data, "wrong", peft=other, max_steps=2, adapter_path=str(whole / name)))
    steps = list(engine.run())
    assert {step.task for step in steps} == {f"{name}-again" for name in NAMES}
    exported = engine.save("shira-again", tmp_path / "shira")
    assert (exported / "adapter_config.json").is_file()
