"""Whole runs with LoRA on the embedding and the head of a tied model: train, stop, resume, sample, go on, merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from muxtune.engine.local import LocalEngine
from muxtune.engine.merge import merge_adapter
from muxtune.errors import MuxTuneError
from muxtune.spec.job import JobSpec
from tests.engine.runs import assert_same_result, job, losses_of, newest_step, run_of, status, stop_after, told, train
from tests.models.merging import model_folder
from tests.tiny import tiny_folder

PEFT = {
    "both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "lora_dropout": 0.1},
    "embedding": {"type": "rslora", "target_modules": ["embed_tokens"]},
    "head": {"r": 4, "target_modules": ["lm_head"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama-tied")


def _job(data: Path, name: str, **keys: Any) -> JobSpec:
    settings = {"peft": PEFT.get(name), "max_steps": 6, "save_steps": 2, "learning_rate": 2e-2, "seed": 7}
    return job(data, name, "sql", **{**settings, **keys})


def _jobs(data: Path) -> list[JobSpec]:
    return [_job(data, name) for name in PEFT]


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run of them all."""
    output = tmp_path_factory.mktemp("whole")
    events = train(run_of(model, output, _jobs(data)))
    for name in PEFT:
        losses = losses_of(events, name)
        assert status(output / name) == "completed" and losses[-1] < losses[0]
    return output


def test_stopped_and_resumed_is_undisturbed_bit_for_bit(whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    train(run_of(model, tmp_path, _jobs(data)), stop=stop_after(3))
    assert all(0 < newest_step(tmp_path / name) < 6 for name in PEFT)
    train(run_of(model, tmp_path, _jobs(data)), resume=True)
    for name in PEFT:
        assert_same_result(whole / name, tmp_path / name)


def test_a_finished_folder_and_a_checkpoint_answer_alike_and_a_job_starts_from_either(
    whole: Path, model: Path, data: Path
) -> None:
    engine = LocalEngine(str(model))
    prompt = "How many users are above 40? "
    for name in PEFT:
        finished = engine.load(whole / name, name=f"{name}-finished")
        newest = engine.load(whole / name / "checkpoints" / "step-00000006", name=f"{name}-newest")
        assert torch.equal(finished.adapter.parameters.values, newest.adapter.parameters.values)
        again = _job(data, name, max_steps=2, adapter_path=str(whole / name), seed=11)
        task = engine.attach(again.model_copy(update={"name": f"{name}-again"}))
        assert torch.equal(task.adapter.parameters.values, finished.adapter.parameters.values)
    requests = [(f"{name}-{kind}", prompt) for name in PEFT for kind in ("finished", "newest")]
    replies = engine.generate([*requests, (None, prompt)], max_new_tokens=12)
    assert replies[0:-1:2] == replies[1:-1:2] and replies[4] != replies[-1]
    assert {step.task for step in engine.run()} == {f"{name}-again" for name in PEFT}


def test_a_trained_adapter_merges_into_the_tied_base(whole: Path, model: Path, tmp_path: Path) -> None:
    report = merge_adapter(whole / "both", model_folder(model, tmp_path), tmp_path / "merged")
    assert report.difference is not None and report.effect is not None and report.difference < 1e-4 < report.effect


def test_a_type_with_no_place_there_is_refused_before_anything_trains(model: Path, data: Path, tmp_path: Path) -> None:
    wrong = _job(data, "wrong", peft={"type": "pissa", "target_modules": ["q_proj", "lm_head"]})
    with pytest.raises(MuxTuneError, match="'lm_head' is the base model's head, which pissa does not train"):
        train(run_of(model, tmp_path, [wrong]))
    events = train(run_of(model, tmp_path, [wrong, _job(data, "head")]), keep_going=True)
    assert status(tmp_path / "head") == "completed" and told(events, "wrong") == ["failed"]
