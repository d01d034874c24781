"""Every alias means its key, and no key may be given twice."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec import JobSpec, Lora, RunSpec
from muxtune.spec.aliases import JOB_ALIASES, PACKING, PEFT_ALIASES, REFUSED, RUN_ALIASES, Alias
from tests.spec.configs import HEAD, JOB, load

pytestmark = pytest.mark.usefixtures("folder")

# What each of our keys is given as in these tests, and reads as.
VALUES: dict[str, tuple[str, object]] = {
    "base_model": ("m2", "m2"),
    "peft.type": ("lora", "lora"),
    "peft.r": ("3", 3),
    "peft.lora_alpha": ("5", 5),
    "peft.lora_dropout": ("0.25", 0.25),
    "peft.target_modules": ("[up, down]", ("up", "down")),
    "validation.path": ("v.jsonl", "v.jsonl"),
    "val_set_size": ("0.1", 0.1),
    "max_length": ("99", 99),
    "learning_rate": ("1e-5", 1e-5),
    "lr_scheduler_type": ("cosine", "cosine"),
    "warmup_steps": ("0.25", 0.25),
    "optimizer": ("adamw_torch", "adamw"),
    "num_train_epochs": ("7", 7),
    "per_device_train_batch_size": ("6", 6),
    "seed": ("11", 11),
    "save_steps": ("13", 13),
}
FLAGS: dict[str, tuple[object, object]] = {
    "lora_target_linear": ("all-linear", "all-linear"),
    "train_on_inputs": ("all", None),
    "train_on_input": ("all", None),
    "train_on_prompt": ("all", None),
    "mask_history": ("last_assistant", None),
    "train_on_completions": (None, "all"),
    "completion_only_loss": ("completion", "all"),
    "assistant_only_loss": ("assistant", None),
}


def value_at(spec: object, dotted: str) -> object:
    for key in dotted.split("."):
        spec = getattr(spec, key)
    return spec


def plain_aliases(aliases: tuple[Alias, ...]) -> list[Alias]:
    return [alias for alias in aliases if alias.name not in FLAGS and alias.name != "training_file"]


@pytest.mark.parametrize("alias", plain_aliases(JOB_ALIASES), ids=lambda alias: alias.name)
def test_job_aliases(alias: Alias) -> None:
    text, value = VALUES[alias.ours]
    resolved = load(JOB + f"{alias.name}: {text}\n")
    assert value_at(resolved.run.jobs[0], alias.ours) == value
    origin = resolved.origin("jobs", "run", *alias.ours.split("."))
    assert str(origin) == f"run.yaml:4 (alias {alias.name})"


@pytest.mark.parametrize("alias", plain_aliases(PEFT_ALIASES), ids=lambda alias: alias.name)
def test_peft_aliases(alias: Alias) -> None:
    text, value = VALUES[f"peft.{alias.ours}"]
    assert value_at(load(JOB + f"peft: {{{alias.name}: {text}}}\n").run.jobs[0].peft, alias.ours) == value


@pytest.mark.parametrize("alias", RUN_ALIASES, ids=lambda alias: alias.name)
def test_run_aliases(alias: Alias) -> None:
    assert load(f"{alias.name}: m2\noutput_dir: o\ndatasets: a\n").run.base_model == "m2"
    with pytest.raises(ConfigError, match="both set base_model"):
        load(JOB + f"{alias.name}: m2\n")


@pytest.mark.parametrize(("name", "yes", "no"), [(name, *both) for name, both in FLAGS.items()])
def test_flag_aliases(name: str, yes: object, no: object) -> None:
    ours = next(alias.ours for alias in JOB_ALIASES if alias.name == name)
    for flag, value in [("true", yes), ("no", no)]:
        assert value_at(load(JOB + f"{name}: {flag}\n").run.jobs[0], ours) == value
    with pytest.raises(ConfigError, match="true or false") as caught:
        load(JOB + f"{name}: 3\n")
    assert caught.value.where == f"run.yaml:4 {name}"


def test_a_flag_set_back_takes_back_the_defaults() -> None:
    text = HEAD + "defaults: {datasets: a, train_on: all}\njobs: [{name: x, train_on_inputs: false}]\n"
    assert load(text).run.jobs[0].train_on is None


def test_training_file_is_the_data_sets() -> None:
    assert load(HEAD + "training_file: a.jsonl\n").run.jobs[0].datasets[0].path == "a.jsonl"


def test_every_alias_leads_to_a_key_and_is_none_itself() -> None:
    ours = {*JobSpec.model_fields, *(f"peft.{key}" for key in Lora.model_fields), "validation.path"}
    assert {alias.ours for alias in JOB_ALIASES} <= ours
    assert {alias.ours for alias in PEFT_ALIASES} <= set(Lora.model_fields)
    names = [alias.name for alias in JOB_ALIASES] + list(PACKING) + list(REFUSED)
    assert len(set(names)) == len(names)
    assert not set(names) & set(JobSpec.model_fields)
    assert not {alias.name for alias in PEFT_ALIASES} & set(Lora.model_fields)
    assert {alias.ours for alias in RUN_ALIASES} <= set(RunSpec.model_fields)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("lr: 1\nlearning_rate: 1\n", "lr and learning_rate both set learning_rate"),
        ("lora_r: 1\nlora_rank: 1\n", "lora_rank and lora_r both set peft.r"),
        ("lora_r: 1\npeft: {r: 1}\n", "lora_r and peft.r both set peft.r"),
        ("adapter: lora\npeft: lora\n", "adapter and peft.type both set peft.type"),
        ("peft: {rank: 1, r: 1}\n", "rank and r both set r"),
        ("validation_file: v\nvalidation: {path: v}\n", "both set validation.path"),
        ("train_on_inputs: true\nmask_history: true\n", "both set train_on"),
        ("warmup_ratio: 0.1\nwarmup_steps: 0.1\n", "both set warmup_steps"),
    ],
)
def test_a_key_under_two_names(extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(JOB + extra)


def test_names_of_one_spec_may_mix() -> None:
    job = load(JOB + "adapter: lora\nlora_r: 4\npeft: {lora_alpha: 3}\n").run.jobs[0]
    assert (job.peft.r, job.peft.lora_alpha) == (4, 3)


def test_an_alias_below_and_the_key_above_are_no_conflict() -> None:
    text = HEAD + "defaults: {lr: 1e-3, lora_r: 4}\njobs: [{name: x, datasets: a, learning_rate: 2e-3, peft: {r: 2}}]\n"
    job = load(text).run.jobs[0]
    assert (job.learning_rate, job.peft.r) == (2e-3, 2)


def test_warmup_ratio_is_a_fraction() -> None:
    for value in ("1", "3", "-0.1", "x"):
        with pytest.raises(ConfigError) as caught:
            load(JOB + f"warmup_ratio: {value}\n")
        assert caught.value.where == "run.yaml:4 warmup_ratio"


@pytest.mark.parametrize("key", PACKING)
def test_packing_is_how_things_are(key: str) -> None:
    assert load(JOB + f"{key}: true\n").run == load(JOB).run
    with pytest.raises(ConfigError, match="always packed"):
        load(JOB + f"{key}: false\n")


@pytest.mark.parametrize("key", sorted(REFUSED.keys() - {"base_model", "output_dir"}))
def test_keys_that_mean_nothing_here(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(JOB + f"{key}: true\n")
    assert (caught.value.message, caught.value.hint) == REFUSED[key]
