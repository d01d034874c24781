"""What a run would be, told without running it: a plan's memory is within a dry run's, and of the same parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from muxtune.engine.forecast import forecast_of
from muxtune.engine.training import TrainingRun
from muxtune.plan.cost import CostModel
from muxtune.plan.planner import make_plan
from muxtune.spec.job import JobSpec
from tests.engine.runs import run_of
from tests.plan.tables import table
from tests.tiny import tiny_folder

LONG = "the users of the table who are older than thirty years and live in a town, " * 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "gemma2")  # keeps scores: what rows see counts


def _job(data: Path, name: str, file: str, **keys: object) -> JobSpec:
    return JobSpec(name=name, datasets=[str(data / file)], per_device_train_batch_size=2, max_steps=4, seed=7, **keys)


def _jobs(data: Path, long: Path) -> list[JobSpec]:
    """One of them of long sequences, which are cut and whose activations are kept."""
    return [
        _job(data, "sql", "sql.jsonl", peft="lora"),
        _job(data, "chat", "chat.jsonl", peft="prefix_tuning"),
        _job(long, "long", "long.jsonl", peft="ia3"),
    ]


def test_a_plan_holds_what_a_dry_run_allows_and_what_they_hold_in_any_case_is_the_same(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muxtune.engine.admission.DEFAULT_CHUNK_TOKENS", 64)
    (tmp_path / "long.jsonl").write_text(4 * (json.dumps({"text": LONG}) + "\n"))
    training = TrainingRun(run_of(model, tmp_path / "out", _jobs(data, tmp_path)))
    base = training.base()
    prepared, _ = training.prepare(training.plan()[0], base)
    admission = training.admit(prepared, base)
    assert admission.keep_tokens and not admission.waiting
    found = forecast_of(prepared, admission, table())
    held = admission.process_bytes + admission.model.weights_bytes + sum(size.held_bytes for size in admission.sizes)
    assert found.memory.held_bytes(found.loads) == held
    by_name = {load.name: load for load in found.loads}
    assert any(chunk.resumes for chunk in by_name["long"].chunks)
    for policy in ("sequential", "fuse-all", "muxtune"):
        plan = make_plan(found.loads, CostModel(table(4096)), found.memory, policy, most_rows=found.most_rows)
        nothing_kept = replace(found.memory, keep_tokens=0).peak_bytes(
            found.loads, [[by_name[name] for name in htask.tasks] for htask in plan.htasks]
        )
        assert held < nothing_kept < plan.peak_bytes <= admission.peak_bytes
