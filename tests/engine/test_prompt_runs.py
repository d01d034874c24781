"""Whole runs of prefix and prompt tuning, with their defaults alone: train, stop and resume, sample, start from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from peft import PeftModel

import muxtune
from muxtune.data.prepare import DEFAULT_MAX_LENGTH, Preparer
from muxtune.engine.training import TrainingRun
from muxtune.errors import ConfigError
from muxtune.spec.job import JobSpec
from tests.engine.runs import assert_same_result, metrics, newest_step, run_of, status
from tests.reference_prompts import prompt_of
from tests.tiny import POSITIONS, tiny_folder, tiny_model

NAMES = ("prefix_tuning", "prompt_tuning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


def _job(data: Path, name: str, **keys: object) -> JobSpec:
    datasets = [str(data / "sql.jsonl")]
    return JobSpec(name=name, datasets=datasets, per_device_train_batch_size=2, **{"peft": name, "seed": 7, **keys})


def _jobs(data: Path) -> list[JobSpec]:
    """Both by their names alone, and a LoRA beside them."""
    return [_job(data, name, max_steps=6, save_steps=2) for name in (*NAMES, "lora")]


def _train(model: Path, output: Path, jobs: Sequence[JobSpec], *, resume: bool = False, rounds: int = 99) -> None:
    for _ in TrainingRun(run_of(model, output, jobs), resume=resume, stop=_after(rounds)).events():
        pass


def _after(rounds: int) -> Callable[[], bool]:
    left = iter(range(rounds))
    return lambda: next(left, None) is None


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run."""
    output = tmp_path_factory.mktemp("whole")
    _train(model, output, _jobs(data))
    return output


def test_each_learns_with_its_defaults(whole: Path) -> None:
    for name in NAMES:
        assert status(whole / name) == "completed"
        rows = [row for row in metrics(whole / name) if "train/loss" in row]
        assert len(rows) == 6 and rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_stopped_and_resumed_is_undisturbed_bit_for_bit(whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    _train(model, tmp_path, _jobs(data), rounds=3)
    assert all(newest_step(tmp_path / name) == 3 for name in NAMES)
    _train(model, tmp_path, _jobs(data), resume=True)
    for name in NAMES:
        assert_same_result(whole / name, tmp_path / name)


def test_alone_is_together_bit_for_bit(whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    for job in _jobs(data):
        _train(model, tmp_path, [job])
        assert_same_result(whole / job.name, tmp_path / job.name)


def test_the_finished_folder_answers_here_and_loads_in_peft(whole: Path, model: Path, data: Path) -> None:
    engine = muxtune.Engine(str(model))
    replies = {}
    for name in NAMES:
        finished = engine.load(whole / name, name=f"{name}-finished")
        newest = engine.load(whole / name / "checkpoints" / "step-00000006", name=f"{name}-newest")
        prompt = "How many users are above 40? "
        replies[name] = [engine.sample(prompt, task=task, max_new_tokens=12) for task in (finished, newest, None)]
        assert replies[name][0] == replies[name][1]
        tuned = PeftModel.from_pretrained(tiny_model("llama"), whole / name)
        assert tuned.peft_config["default"].peft_type == name.upper()
        assert prompt_of(tuned).shape[0] == 20
    assert any(one != bare for one, _, bare in replies.values()), "none of them matters to what is said"


def test_a_job_goes_on_from_a_folder(whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    jobs = [_job(data, f"{n}-2", peft=n, adapter_path=str(whole / n), max_steps=2, learning_rate=1e-4) for n in NAMES]
    _train(model, tmp_path, jobs)
    for name in NAMES:
        first, *_ = (row["train/loss"] for row in metrics(tmp_path / f"{name}-2") if "train/loss" in row)
        began, *_ = (row["train/loss"] for row in metrics(whole / name) if "train/loss" in row)
        assert first < began


@pytest.mark.parametrize("name", NAMES)
def test_the_default_length_leaves_room_for_the_virtual_tokens(name: str, model: Path, data: Path) -> None:
    preparer = Preparer(model)
    assert preparer.max_length(_job(data, name)) == POSITIONS - 20 < DEFAULT_MAX_LENGTH
    assert preparer.max_length(_job(data, name, max_length=POSITIONS - 20)) == POSITIONS - 20
    with pytest.raises(ConfigError, match="beside 20 virtual tokens") as caught:
        preparer.max_length(_job(data, name, max_length=POSITIONS - 19))
    assert caught.value.hint == f"at most {POSITIONS - 20}"
    wide = {"type": name, "num_virtual_tokens": POSITIONS - 1}
    with pytest.raises(ConfigError, match="leave no room beside 255 virtual tokens"):
        preparer.max_length(_job(data, name, peft=wide))


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_ends_where_the_positions_do(name: str, model: Path, data: Path, tmp_path: Path) -> None:
    wide = {"type": name, "num_virtual_tokens": POSITIONS - 60}
    engine = muxtune.Engine(str(model))
    task = engine.attach(_job(data, name, peft=wide, max_steps=1))
    assert engine.sample("How many?", task=task, max_new_tokens=500) is not None
    with pytest.raises(ConfigError, match="there is room for 59 and a reply"):
        engine.sample("How many users are above forty? " * 20, task=task)


def test_a_dry_run_counts_them(model: Path, data: Path, tmp_path: Path) -> None:
    jobs = [_job(data, name) for name in (*NAMES, "lora")]
    run = TrainingRun(run_of(model, tmp_path, jobs))
    base = run.base()
    prepared, _ = run.prepare(run.plan()[0], base)
    prefix, prompt, lora = run.admit(prepared, base).sizes
    assert prefix.longest == prompt.longest == lora.longest + 20
    assert prefix.widest == lora.widest < prompt.widest
    json.dumps([size.parameters for size in (prefix, prompt)])
    assert (prefix.parameters, prompt.parameters) == (20 * 2 * 2 * 32, 20 * 48)
