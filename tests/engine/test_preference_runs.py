"""Whole runs with preference jobs: resumed bit for bit, beside sft, from files to folders, and never on other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muxtune.engine.local import LocalEngine
from muxtune.errors import ConfigError, DataError
from muxtune.spec.job import JobSpec
from tests.engine.runs import (
    assert_same_result,
    job,
    metrics,
    run_of,
    steps_of,
    stop_after,
    train,
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"Is {number} a number?" + " Say." * (number % 3)}]},
            "preferred_output": [{"role": "assistant", "content": f"yes, {number} is"}],
            "non_preferred_output": [{"role": "assistant", "content": "no" + "!" * (number % 4)}],
        }
        for number in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preferring(pairs: Path, **changes: Any) -> JobSpec:
    """Seven pairs to train on and two held out: epochs of four steps, the last one smaller."""
    keys: dict[str, Any] = {
        "name": "taste",
        "method": "dpo",
        "datasets": [str(pairs)],
        "peft": {"r": 4, "lora_dropout": 0.1},
        "val_set_size": 2,
        "eval_steps": 3,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "seed": 5,
    }
    return JobSpec(**{**keys, **changes})


def test_resumed_is_undisturbed_bit_for_bit(
    tiny_llama: Path, disk: Path, data: Path, cache: Path, pairs: Path, tmp_path: Path
) -> None:
    jobs = [preferring(pairs), job(data, "sql", num_train_epochs=2)]
    undisturbed = run_of(tiny_llama, disk / "whole", jobs)
    train(undisturbed, cache_dir=cache)
    alone = run_of(tiny_llama, disk / "alone", jobs[:1])
    train(alone, cache_dir=tmp_path / "cold")
    for name, resumed_cache in (("warm", cache), ("cold", tmp_path / "colder")):
        run = run_of(tiny_llama, disk / name, jobs)
        train(run, cache_dir=cache, stop=stop_after(3))
        events = train(run, cache_dir=resumed_cache, resume=True)
        assert steps_of(events, "taste") == [4, 5, 6, 7, 8]
        for each in ("taste", "sql"):
            assert_same_result(disk / "whole" / each, disk / name / each)
    assert_same_result(disk / "whole/taste", disk / "alone/taste")


def test_the_metrics_say_what_trl_says(tiny_llama: Path, disk: Path, cache: Path, pairs: Path) -> None:
    train(run_of(tiny_llama, disk / "run", [preferring(pairs, num_train_epochs=6)]), cache_dir=cache)
    rows = metrics(disk / "run/taste")
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 24 and all("train/token_accuracy" not in row for row in steps)
    for row in steps:
        margin = row["train/rewards/chosen"] - row["train/rewards/rejected"]
        assert row["train/rewards/margins"] == pytest.approx(margin, abs=1e-12)
    assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3), "LoRA starts at the backbone: log 2"
    assert steps[-1]["train/rewards/margins"] > 1 and steps[-1]["train/rewards/accuracies"] == 1
    evaluated = [row for row in rows if "eval/loss" in row]
    assert [row["train/global_step"] for row in evaluated] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert evaluated[-1]["eval/rewards/margins"] > evaluated[0]["eval/rewards/margins"]


def test_a_second_run_finds_every_value_on_disk(tiny_llama: Path, disk: Path, pairs: Path) -> None:
    """The sweep over beta and rate that follows a run computes no reference value at all."""
    train(run_of(tiny_llama, disk / "run", [preferring(pairs)]), cache_dir=disk / "cache")
    (entry,) = (disk / "cache/references").iterdir()
    engine = LocalEngine(str(tiny_llama), cache_dir=disk / "cache")
    task = engine.attach(preferring(pairs, beta=0.7, learning_rate=1e-4))
    members = [task.participant(), task.validation_participant()]
    assert engine.refer(members) is None
    cold = LocalEngine(str(tiny_llama), cache_dir=disk / "cold")
    task = cold.attach(preferring(pairs))
    assert cold.refer(members) is not None
    for member in members:
        for index in (ref.index for chunk in member.chunks for ref in chunk):
            value = engine.references.value(member.source, index)
            assert value is not None and value == cold.references.value(member.source, index)
    cut = LocalEngine(str(tiny_llama), cache_dir=disk / "cache", num_hidden_layers=1)
    cut.attach(preferring(pairs))
    assert cut.refer(members) is not None, "a backbone of other layers is another"
    assert entry.exists()


def test_it_answers_as_its_pairs_were_written(tiny_llama: Path, cache: Path, pairs: Path, tmp_path: Path) -> None:
    engine = LocalEngine(str(tiny_llama), cache_dir=cache)
    task = engine.attach(preferring(pairs, max_steps=1, val_set_size=0, eval_steps=None))
    assert [result.rewards is not None for result in engine.run()] == [True]
    reply = engine.sample("Is 3 a number?", task=task, max_new_tokens=4)
    engine.save(task, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/training_manifest.json").read_text())
    assert (manifest["prompt"]["shape"], manifest["job"]["method"], manifest["job"]["beta"]) == ("messages", "dpo", 0.1)
    loaded = engine.load(tmp_path / "out", name="loaded")
    assert engine.sample("Is 3 a number?", task=loaded, max_new_tokens=4) == reply


def test_the_wrong_data_stop_the_run_before_anything_is_written(
    tiny_llama: Path, disk: Path, data: Path, cache: Path, pairs: Path
) -> None:
    with pytest.raises(DataError, match="are preference pairs, the method is sft"):
        train(run_of(tiny_llama, disk / "run", [job(data, "sql", datasets=[str(pairs)])]), cache_dir=cache)
    with pytest.raises(DataError, match="not preference pairs but prompt_completion, the method is dpo"):
        train(run_of(tiny_llama, disk / "run", [preferring(data / "sql.jsonl")]), cache_dir=cache)
    with pytest.raises(ConfigError, match=r"beta: 0.1 -> 0.2"):
        train(run_of(tiny_llama, disk / "run", [preferring(pairs, max_steps=1)]), cache_dir=cache)
        train(
            run_of(tiny_llama, disk / "run", [preferring(pairs, max_steps=1, beta=0.2)]), cache_dir=cache, resume=True
        )
