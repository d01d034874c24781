"""Which jobs may continue what a job of their name began."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec import JobSpec, changed_keys, check_resume, resume_allowed

CONSTANT = {"lr_scheduler_type": "constant"}


def job(**keys: object) -> JobSpec:
    return JobSpec(**{"name": "a", "datasets": ("a.jsonl",), "max_steps": 10, **keys})  # type: ignore[arg-type]


def test_changes_are_listed_key_by_key() -> None:
    new = job(seed=1, peft={"r": 4}, datasets=("a.jsonl", "b.jsonl"))
    assert [(c.key, c.old, c.new) for c in changed_keys(job(), new)][:1] == [("peft.r", 8, 4)]
    assert [c.key for c in changed_keys(job(), new)] == ["peft.r", "datasets", "seed"]
    assert changed_keys(job(), job()) == []


ALLOWED = [
    ({}, {}),
    ({}, {"save_steps": 3, "save_total_limit": 9, "logging_steps": 1, "sample_prompts": ("hi",)}),
    ({}, {"validation": {"path": "v"}, "eval_steps": 2}),
    ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ({"peft": {"target_modules": ["q", "v"]}}, {"peft": {"target_modules": ["v", "q"]}}),
    (CONSTANT, {**CONSTANT, "max_steps": 20}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, {"max_steps": 11}),
    ({**CONSTANT, "max_steps": None, "num_train_epochs": 1}, {**CONSTANT, "max_steps": None, "num_train_epochs": 2}),
    ({"num_train_epochs": 3}, {"num_train_epochs": 1}),  # without effect beside max_steps
]
REFUSED = [
    ({}, {"max_steps": 20}),
    ({"lr_scheduler_type": "cosine"}, {"max_steps": 20}),
    (CONSTANT, {**CONSTANT, "max_steps": 9}),
    (CONSTANT, {**CONSTANT, "max_steps": None}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, {"max_steps": 20}),
    (CONSTANT, {"lr_scheduler_type": "linear", "max_steps": 20}),
    ({"max_steps": None, "num_train_epochs": 1}, {"max_steps": None, "num_train_epochs": 2}),
    ({}, {"seed": 1}),
    ({}, {"learning_rate": 1e-3}),
    ({}, {"peft": {"r": 4}}),
    ({}, {"peft": {"target_modules": ["q"]}}),
    ({}, {"per_device_train_batch_size": 4}),
    ({}, {"val_set_size": 0.1}),
    ({}, {"datasets": ("b.jsonl",)}),
    ({}, {"shuffle": False}),
    ({}, {"max_length": 64}),
    ({}, {"adapter_path": "p"}),
]


@pytest.mark.parametrize(("old", "change"), ALLOWED)
def test_allowed(old: dict[str, object], change: dict[str, object]) -> None:
    assert resume_allowed(job(**old), job(**{**old, **change}))
    check_resume(job(**old), job(**{**old, **change}))


@pytest.mark.parametrize(("old", "change"), REFUSED)
def test_refused(old: dict[str, object], change: dict[str, object]) -> None:
    before, after = job(**old), job(**{**old, **change})
    assert not resume_allowed(before, after)
    with pytest.raises(ConfigError) as caught:
        check_resume(before, after)
    key = next(iter(change.keys() & {c.key.split(".")[0] for c in changed_keys(before, after)}))
    assert key in caught.value.message
    assert caught.value.where == "jobs.a"


def test_moved_data_of_the_same_content() -> None:
    moved = job(datasets=("b.jsonl",))
    assert resume_allowed(job(), moved, same_data=True)
    assert not resume_allowed(job(), job(datasets=({"path": "b.jsonl", "weight": 2},)), same_data=True)


def test_every_key_of_a_job_is_decided_on() -> None:
    """A key added to JobSpec is refused until someone says that it is free: a change of it must not slip through."""
    from muxtune.spec.resume import FREE

    assert set(JobSpec.model_fields) >= FREE
