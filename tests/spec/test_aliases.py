"""Every alias means its key, and no key may be given twice."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec import JobSpec, RunSpec
from muxtune.spec.aliases import JOB_ALIASES, PACKING, PEFT_ALIASES, REFUSED, RUN_ALIASES, Alias
from muxtune.spec.peft import PEFT_SPECS
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
    "peft.use_dora": ("true", True),
    "peft.use_rslora": ("true", True),
    "peft.init_lora_weights": ("pissa", "pissa"),
    "peft.feedforward_modules": ("[down]", ("down",)),
    "peft.num_virtual_tokens": ("9", 9),
    "peft.reduction_factor": ("4", 4),
    "peft.bottleneck_size": ("12", 12),
    "peft.non_linearity": ("silu", "swish"),
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
# The type whose key it is, where LoRA has none of that name.
TYPES = {
    "peft.feedforward_modules": "ia3",
    "peft.num_virtual_tokens": "prefix_tuning",
    "peft.reduction_factor": "bottleneck",
    "peft.bottleneck_size": "bottleneck",
    "peft.non_linearity": "bottleneck",
}
FLAGS: dict[str, tuple[object, object]] = {
    "lora_target_linear": ("all-linear", "all-linear"),
    "pissa_init": ("pissa", True),
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
    odd = (*FLAGS, "training_file", "method.type")
    return [alias for alias in aliases if alias.name not in odd]


def written(alias: Alias, text: str) -> str:
    """A line of YAML: a dotted alias lies in a mapping."""
    head, _, tail = alias.name.partition(".")
    return f"{head}: {{{tail}: {text}}}\n" if tail else f"{head}: {text}\n"


@pytest.mark.parametrize("alias", plain_aliases(JOB_ALIASES), ids=lambda alias: alias.name)
def test_job_aliases(alias: Alias) -> None:
    text, value = VALUES[alias.ours]
    kind = f"peft: {TYPES[alias.ours]}\n" if alias.ours in TYPES else ""
    resolved = load(JOB + written(alias, text) + kind)
    assert value_at(resolved.run.jobs[0], alias.ours) == value
    origin = resolved.origin("jobs", "run", *alias.ours.split("."))
    assert str(origin) == f"run.yaml:4 (alias {alias.name})"


@pytest.mark.parametrize("alias", plain_aliases(PEFT_ALIASES), ids=lambda alias: alias.name)
def test_peft_aliases(alias: Alias) -> None:
    text, value = VALUES[f"peft.{alias.ours}"]
    kind = f"type: {TYPES[f'peft.{alias.ours}']}, " if f"peft.{alias.ours}" in TYPES else ""
    assert value_at(load(JOB + f"peft: {{{kind}{alias.name}: {text}}}\n").run.jobs[0].peft, alias.ours) == value


@pytest.mark.parametrize("alias", RUN_ALIASES, ids=lambda alias: alias.name)
def test_run_aliases(alias: Alias) -> None:
    assert load(f"{written(alias, 'm2')}output_dir: o\ndatasets: a\n").run.base_model == "m2"
    assert load(JOB, f"{alias.name}=m2").run.base_model == "m2"
    with pytest.raises(ConfigError, match="both set base_model"):
        load(JOB + written(alias, "m2"))


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


def test_method_type_is_the_method() -> None:
    assert load(JOB + "method: {type: supervised}\n").run.jobs[0].method == "sft"
    with pytest.raises(ConfigError, match="method") as caught:
        load(JOB + "method: {type: reinforcement}\n")
    assert caught.value.where == "run.yaml:4 method"


@pytest.mark.parametrize("line", ["tokenizer: {path: x}", "tokenizer: x", "tokenizer: {max_seq_len: 9, path: x}"])
def test_what_else_a_mapping_holds_is_not_ignored(line: str) -> None:
    with pytest.raises(ConfigError, match="unknown key 'tokenizer'"):
        load(JOB + line + "\n")
    with pytest.raises(ConfigError, match="unknown key 'checkpointer'"):
        load("checkpointer: {checkpoint_dir: m, model_type: LLAMA3}\noutput_dir: o\ndatasets: a\n")


def test_targets_may_be_a_mapping_of_flags() -> None:
    job = load(JOB + "peft: {target_modules: {q_proj: true, k_proj: false, v_proj: yes}}\n").run.jobs[0]
    assert value_at(job, "peft.target_modules") == ("q_proj", "v_proj")
    with pytest.raises(ConfigError, match="true or false"):
        load(JOB + "peft: {target_modules: {q_proj: 3}}\n")


def test_names_of_types_that_other_tools_use() -> None:
    for name, ours in [
        ("BEFT", "bitfit"),
        ("double_seq_bn", "houlsby"),
        ("seq_bn", "pfeiffer"),
        ("par_bn", "parallel"),
        ("prefix-tuning", "prefix_tuning"),
        ("PREFIX_TUNING", "prefix_tuning"),
    ]:
        assert load(JOB + f"adapter: {name}\n").run == load(JOB + f"peft: {ours}\n").run
    with pytest.raises(ConfigError, match="quantised"):
        load(JOB + "adapter: qlora\n")


def test_every_alias_leads_to_a_key_and_is_none_itself() -> None:
    peft_keys = {key for spec in PEFT_SPECS.values() for key in spec.model_fields}
    ours = {*JobSpec.model_fields, *(f"peft.{key}" for key in peft_keys), "validation.path"}
    assert {alias.ours for alias in JOB_ALIASES} <= ours
    assert {alias.ours for alias in PEFT_ALIASES} <= peft_keys
    names = [alias.name for alias in JOB_ALIASES] + list(PACKING) + list(REFUSED)
    assert len(set(names)) == len(names)
    assert not set(names) & set(JobSpec.model_fields)
    assert not {alias.name for alias in PEFT_ALIASES} & peft_keys
    assert {alias.ours for alias in RUN_ALIASES} <= set(RunSpec.model_fields)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("lr: 1\nlearning_rate: 1\n", "lr and learning_rate both set learning_rate"),
        ("lora_r: 1\nlora_rank: 1\n", "lora_rank and lora_r both set peft.r"),
        ("lora_r: 1\npeft: {r: 1}\n", "lora_r and peft.r both set peft.r"),
        ("adapter: lora\npeft: lora\n", "adapter and peft.type both set peft.type"),
        ("peft: {rank: 1, r: 1}\n", "rank and r both set r"),
        ("optimizer: {lr: 1}\nlearning_rate: 1\n", "optimizer.lr and learning_rate both set learning_rate"),
        ("pissa_init: true\ninit_lora_weights: true\n", "both set peft.init_lora_weights"),
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
