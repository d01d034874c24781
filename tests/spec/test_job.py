"""JobSpec in Python: defaults, refusals, JSON."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.spec import Dataset, Job, JobSpec, Lora, RunSpec, Validation
from tests.spec.specs import jobs


def test_the_constructor_of_the_contract() -> None:
    job = Job(name="sql", datasets=["sql.jsonl"], peft=Lora(r=8), max_steps=24)  # type: ignore[list-item]
    assert job.datasets == (Dataset(path="sql.jsonl"),)
    assert (job.peft.r, job.max_steps) == (8, 24)


def test_the_defaults_of_the_contract() -> None:
    job = JobSpec(name="a", datasets=(Dataset(path="a"),))
    assert (job.learning_rate, job.lr_scheduler_type, job.warmup_steps) == (2e-4, "linear", 0)
    assert (job.weight_decay, job.max_grad_norm, job.optimizer) == (0, 1.0, "adamw")
    peft = job.peft
    assert (peft.r, peft.lora_alpha, peft.lora_dropout, peft.target_modules) == (8, 16, 0, "all-linear")
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps, job.effective_batch) == (8, 1, 8)
    assert (job.num_train_epochs, job.seed, job.save_total_limit) == (3, 42, 2)
    assert (job.max_steps, job.max_length, job.save_steps, job.train_on, job.overlong) == (None,) * 5
    assert (job.method, job.shuffle, job.report_to, job.eval_every) == ("sft", True, "none", None)


def test_dpo_has_a_beta_and_goes_by_pairs() -> None:
    job = JobSpec(name="a", datasets=("a",), method="dpo")
    assert (job.beta, job.group_size) == (0.1, 2)
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert JobSpec(name="a", datasets=("a",), method="dpo", beta=0.5).beta == 0.5
    sft = JobSpec(name="a", datasets=("a",))
    assert (sft.beta, sft.group_size) == (None, 1)


def test_the_effective_batch_is_the_product() -> None:
    job = JobSpec(name="a", datasets=("a",), per_device_train_batch_size=3, gradient_accumulation_steps=4)
    assert job.effective_batch == 12


@pytest.mark.parametrize(
    ("keys", "where", "message"),
    [
        ({"datasets": []}, "datasets", "should not be empty"),
        ({"datasets": [{"path": ""}]}, "datasets.0.path", "path of a file"),
        ({"datasets": [{"path": "a", "weight": 0}]}, "datasets.0.weight", "more than 0"),
        ({"datasets": [{"path": "a", "pth": 1}]}, "datasets.0.pth", "unknown key"),
        ({"name": "../x"}, "name", "not safe"),
        ({"name": 7}, "name", "should be a name"),
        ({"peft": {"r": 0}}, "peft.r", "at least 1"),
        ({"peft": {"type": "adalora"}}, "peft.type", "unknown PEFT type"),
        ({"peft": 3}, "peft", "PEFT type"),
        ({"learning_rate": 0}, "learning_rate", "more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate", "finite"),
        ({"max_steps": True}, "max_steps", "number"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"seed": 2**63}, "seed", "too large"),
        ({"warmup_steps": 1.5}, "warmup_steps", "fraction below 1"),
        ({"max_grad_norm": -1}, "max_grad_norm", "at least 0"),
        ({"max_length": 1}, "max_length", "at least 2"),
        ({"optimizer": "adafactor"}, "optimizer", "one of adamw"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type", "not supported yet"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 2}, "warmup_steps", "no warmup"),
        ({"validation": "v", "val_set_size": 0.1}, "val_set_size", "both say"),
        ({"validation": {"path": "v", "eval_steps": 2}, "eval_steps": 3}, "eval_steps", "says 2"),
        ({"eval_steps": 3}, "eval_steps", "nothing is held out"),
        ({"lr": 1e-3}, "lr", "unknown key"),
        ({"beta": 0.1}, "beta", "belongs to method dpo"),
        ({"method": "dpo", "beta": 0}, "beta", "more than 0"),
        ({"method": "dpo", "beta": None}, "beta", "dpo needs a beta"),
        ({"method": "dpo", "train_on": "all"}, "train_on", "the two responses"),
        ({"method": "dpo", "overlong": "split"}, "overlong", "cannot be split"),
        ({"method": "dpo", "datasets": [{"path": "a", "type": "text"}]}, "method", "text data do not go with"),
        ({"datasets": [{"path": "a", "type": "preference"}]}, "method", "preference data do not go with method sft"),
        ({"method": "dpo", "validation": {"path": "a", "type": "messages"}}, "method", "messages data do not go"),
    ],
)
def test_refusals_are_config_errors_with_the_key(keys: dict[str, object], where: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobSpec(**{"name": "a", "datasets": ["a"], **keys})  # type: ignore[arg-type]
    assert message in caught.value.message
    assert caught.value.where == where


def test_validating_json_meets_the_same_errors() -> None:
    for attempt in (
        lambda: JobSpec.model_validate({"name": "a", "datasets": ["a"], "peft": {"r": 0}}),
        lambda: JobSpec.model_validate_json('{"name": "a", "datasets": ["a"], "peft": {"r": 0}}'),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert caught.value.where == "peft.r"
    with pytest.raises(ConfigError):
        JobSpec.model_validate_json("{")


def test_a_spec_is_frozen_and_hashable() -> None:
    job = JobSpec(name="a", datasets=("a",))
    with pytest.raises(Exception, match="frozen"):
        job.seed = 3  # type: ignore[misc]
    assert hash(job) == hash(JobSpec(name="a", datasets=("a",)))
    assert pickle.loads(pickle.dumps(job)) == job


def test_evaluation_is_due_as_the_nearer_key_says() -> None:
    held_out = Validation(path="v", eval_steps=5)
    assert JobSpec(name="a", datasets=("a",), validation=held_out).eval_every == 5
    assert JobSpec(name="a", datasets=("a",), validation=Validation(path="v"), eval_steps=7).eval_every == 7
    assert JobSpec(name="a", datasets=("a",), val_set_size=0.1, eval_steps=7).eval_every == 7


@given(jobs())
def test_json_round_trip(job: JobSpec) -> None:
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job


@given(st.lists(jobs(), min_size=1, max_size=3, unique_by=lambda job: job.name.casefold()))
def test_run_json_round_trip(some: list[JobSpec]) -> None:
    run = RunSpec(base_model="m", output_dir="o", jobs=tuple(some))
    assert RunSpec.model_validate_json(run.model_dump_json()) == run
    assert run.job(some[-1].name) == some[-1]


def test_a_run_has_each_name_once() -> None:
    twice = (JobSpec(name="a", datasets=("a",)), JobSpec(name="A", datasets=("a",)))
    with pytest.raises(ConfigError, match="two jobs are named 'A'"):
        RunSpec(base_model="m", output_dir="o", jobs=twice)
    with pytest.raises(KeyError):
        RunSpec(base_model="m", output_dir="o", jobs=twice[:1]).job("b")
