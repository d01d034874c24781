"""config.md's YAML rules, end to end: text in, specs or a placed error out."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxtune.errors import ConfigError, DataError
from muxtune.spec import IA3, Dataset, JobSpec, Lora, RunSpec, Validation, load_run
from tests.spec.configs import HALVING, HEAD, JOB, SWEEP, THREE, load, write

pytestmark = pytest.mark.usefixtures("folder")


def refusal(text: str, *sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text, *sets)
    return caught.value


def test_the_three_jobs_of_the_contract() -> None:
    run = load(THREE).run
    shared = {"max_length": 512, "warmup_steps": 3, "max_steps": 24, "per_device_train_batch_size": 4, "seed": 7}
    assert run == RunSpec(
        base_model="smollm2-135m-instruct",
        output_dir="runs/three",
        jobs=(
            JobSpec(
                name="sql",
                datasets=(Dataset(path="data/sql.jsonl"),),
                validation=Validation(path="data/sql.val.jsonl", eval_steps=12),
                peft=Lora(r=8, lora_alpha=16, target_modules="all-linear"),
                learning_rate=2e-3,
                **shared,
            ),
            JobSpec(
                name="shell",
                datasets=(Dataset(path="data/shell.jsonl", type="messages"),),
                peft=Lora(r=16, lora_alpha=32, target_modules=("q_proj", "v_proj")),
                learning_rate=1e-3,
                **shared,
            ),
            JobSpec(
                name="sentiment",
                datasets=(Dataset(path="data/sentiment.jsonl"),),
                peft=IA3(),
                learning_rate=3e-2,
                **shared,
            ),
        ),
    )


def test_an_unknown_peft_type_is_refused_in_its_line() -> None:
    error = refusal(THREE.replace("{type: ia3}", "{type: ia4}"))
    assert error.where == "run.yaml:22 jobs.sentiment.peft.type"
    assert "unknown PEFT type 'ia4'" in error.message
    assert (error.hint or "").startswith("did you mean 'ia3'? supported: lora, ")
    short = {"dora", "rslora", "pissa", "houlsby", "pfeiffer", "parallel"}
    assert short <= set((error.hint or "").split("supported: ")[1].split(", "))


def test_the_sweep_of_the_contract() -> None:
    assert refusal(SWEEP).where == "run.yaml:15 matrix.halving"
    jobs = load(SWEEP.replace(HALVING, "")).run.jobs
    assert [job.name for job in jobs] == [
        "sql-lr0.0005-r4-alpha8",
        "sql-lr0.0005-r8-alpha16",
        "sql-lr0.0005-r16-alpha32",
        "sql-lr0.001-r4-alpha8",
        "sql-lr0.001-r8-alpha16",
        "sql-lr0.001-r16-alpha32",
        "sql-lr0.002-r4-alpha8",
        "sql-lr0.002-r8-alpha16",
    ]
    last = jobs[-1]
    assert (last.learning_rate, last.peft.r, last.peft.lora_alpha, last.max_steps) == (2e-3, 8, 16, 48)


def test_a_flat_file_is_one_job_named_by_its_stem() -> None:
    run = load(JOB + "lora_r: 4\n", name="conf/sql.yaml").run
    (job,) = run.jobs
    assert (job.name, job.peft.r, job.datasets[0].path) == ("sql", 4, str(Path("conf/a.jsonl")))
    assert load(JOB + "name: 007\n").run.jobs[0].name == "007"


def test_a_stem_that_is_no_safe_name_is_refused() -> None:
    write(Path(), JOB, "my run.yaml")
    with pytest.raises(ConfigError, match="not safe as the name of a folder"):
        load_run("my run.yaml")


def test_paths_join_the_config_folder_and_output_dir_does_not(folder: Path) -> None:
    text = JOB.replace("[a.jsonl]", "[{path: ../data/a.jsonl}, /abs/b.jsonl]")
    text += "validation: v.jsonl\nadapter_path: old/sql\nchat_template: t.jinja\n"
    run = load(text, name="conf/run.yaml").run
    job = run.jobs[0]
    assert [d.path for d in job.datasets] == ["data/a.jsonl", "/abs/b.jsonl"]
    assert job.validation is not None and job.validation.path == "conf/v.jsonl"
    assert (job.adapter_path, job.chat_template, run.output_dir) == ("conf/old/sql", "conf/t.jinja", "out")
    assert load_run(folder / "conf/run.yaml").run.jobs[0].datasets[0].path == str(folder / "data/a.jsonl")


def test_a_bundled_template_is_not_a_path() -> None:
    assert load(JOB + "chat_template: qwen2.5\n", name="c/r.yaml").run.jobs[0].chat_template == "qwen2.5"


def test_mappings_merge_and_lists_replace() -> None:
    text = (
        HEAD
        + """\
defaults:
  datasets: [a.jsonl, b.jsonl]
  validation: {path: v.jsonl, eval_steps: 5}
  sample_prompts: [one, two]
jobs:
  - name: x
    datasets: [c.jsonl]
    validation: {eval_steps: 7}
    sample_prompts: [three]
"""
    )
    job = load(text).run.jobs[0]
    assert [d.path for d in job.datasets] == ["c.jsonl"]
    assert job.validation == Validation(path="v.jsonl", eval_steps=7)
    assert job.sample_prompts == ("three",)


def test_null_takes_a_default_back() -> None:
    text = HEAD + "defaults: {max_steps: 9, peft: {r: 4}, datasets: a}\njobs: [{name: x, max_steps: ~, peft: null}]\n"
    job = load(text).run.jobs[0]
    assert (job.max_steps, job.peft.r) == (None, 8)


@pytest.mark.parametrize(
    ("below", "above", "rank"),
    [
        ("{type: lora, r: 4}", "{lora_alpha: 1}", 4),  # no type said: the default's
        ("{type: lora, r: 4}", "{type: lora}", 4),
        ("{r: 4}", "{type: LoRA}", 4),  # lora is what a mapping without a type is
        ("{type: ia3, r: 4}", "{type: lora}", 8),  # another type
        ("{type: dora, r: 4}", "lora", 4),  # dora is a lora: inherits, and the job's own type holds
        ("pfeiffer", "{type: lora}", 8),
    ],
)
def test_peft_is_inherited_within_a_type_only(below: str, above: str, rank: int) -> None:
    text = HEAD + f"defaults: {{datasets: a, peft: {below}}}\njobs: [{{name: x, peft: {above}}}]\n"
    assert load(text).run.jobs[0].peft.r == rank


def test_a_type_that_is_only_inherited_is_refused_at_the_default() -> None:
    error = refusal(HEAD + "defaults:\n  peft: drora\njobs: [{name: x, datasets: a}]\n")
    assert error.where == "run.yaml:4 jobs.x.peft.type"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("", "run.yaml", "is empty"),
        ("# nothing\n", "run.yaml", "is empty"),
        ("- a\n", "run.yaml:1", "mapping"),
        ("output_dir: o\ndatasets: a\n", "run.yaml base_model", "is missing"),
        (HEAD, "run.yaml:1 jobs", "neither jobs nor the datasets"),
        (HEAD + "seed: 3\n", "run.yaml:1 jobs", "neither jobs nor the datasets"),
        (HEAD + "datasets: 5\n", "run.yaml:3 datasets", "should be paths of data files, got 5"),
        (HEAD + "datasets: [a.jsonl, yes]\n", "run.yaml:3 datasets", "should be paths of data files, got yes"),
        (HEAD + "jobs:\n- {name: a, datasets: 5}\n", "run.yaml:4 jobs.a.datasets", "should be paths"),
        (HEAD + "datasets:\n- {path: a, weight: 1e9}\n", "run.yaml:4 datasets.0.weight", "should be at most 1000"),
        (HEAD + "jobs:\n- {name: a, datasets: d, matrix: true}\n", "run.yaml:4 jobs.a.matrix", "there is no matrix"),
        (JOB + "max_steps: 1e30\n", "run.yaml:4 max_steps", "is too large for a whole number: 1e30"),
        (JOB + "memory_limit: 5XB\n", "run.yaml:4 memory_limit", "should be a size, got '5XB'"),
        (JOB + "memory_limit: 9999999TB\n", "run.yaml:4 memory_limit", "is too large for a size"),
        (JOB + "learning_rte: 1\n", "run.yaml:4", "unknown key 'learning_rte'"),
        (JOB + "peft: {rnk: 3}\n", "run.yaml:4 peft.rnk", "unknown key"),
        (JOB + "seed: 1\nseed: 2\n", "run.yaml:5", "given twice"),
        (JOB + "lr: 1e-3\nlearning_rate: 1e-3\n", "run.yaml:4 lr", "both set learning_rate"),
        (JOB + "learning_rate: fast\n", "run.yaml:4 learning_rate", "should be a number, got 'fast'"),
        (JOB + "learning_rate: .nan\n", "run.yaml:4 learning_rate", "should be a number"),
        (JOB + "learning_rate: 1e999\n", "run.yaml:4 learning_rate", "finite"),
        (JOB + "max_steps: yes\n", "run.yaml:4 max_steps", "should be a number"),
        (JOB + "max_steps: 2.5\n", "run.yaml:4 max_steps", "whole number"),
        (JOB + "max_steps: 0\n", "run.yaml:4 max_steps", "at least 1, got 0"),
        (JOB + "peft:\n  r: 0\n", "run.yaml:5 peft.r", "at least 1"),
        (JOB + "shuffle: maybe\n", "run.yaml:4 shuffle", "true or false"),
        (JOB + "method: ppo\n", "run.yaml:4 method", "should be one of sft, dpo"),
        (JOB + "beta: 0.1\n", "run.yaml:4 beta", "belongs to method dpo"),
        (JOB + "report_to: [wandb]\n", "run.yaml:4 report_to", "not supported yet"),
        (JOB + "tp: 0\n", "run.yaml:4 tp", "at least 1"),
        (JOB + "policy: fuse_all\n", "run.yaml:4 policy", "should be one of"),
        (JOB + "block: fats\n", "run.yaml:4 block", "one of auto, fast, transformers"),
        (JOB + "dtype: fp16\n", "run.yaml:4 dtype", "not supported yet"),
        (JOB + "device: tpu\n", "run.yaml:4 device", "cuda:N"),
        (JOB + "defaults: {seed: 1}\n", "run.yaml:4 defaults", "no jobs"),
        (JOB + "matrx: {}\n", "run.yaml:4", "unknown key 'matrx'"),
        (JOB + "name: con\n", "run.yaml:4 name", "device on Windows"),
        (JOB.replace("a.jsonl", "{path: a, type: completion}"), "run.yaml:3 datasets.0.type", "different things"),
        (HEAD + "seed: 3\njobs: [{name: x}]\n", "run.yaml:3 seed", "a job's key"),
        (HEAD + "jobs: []\n", "run.yaml:3 jobs", "no job"),
        (HEAD + "jobs: {a: {}}\n", "run.yaml:3 jobs", "list"),
        (HEAD + "jobs:\n- just text\n", "run.yaml:4 jobs.0", "mapping"),
        (HEAD + "jobs:\n- seed: 2\n", "run.yaml:4 jobs.0", "no name"),
        (HEAD + "jobs:\n- name: a/b\n", "run.yaml:4 jobs.0.name", "not safe"),
        (HEAD + "jobs:\n- {name: a, base_model: b}\n", "run.yaml:4 jobs.a.base_model", "one backbone a run"),
        (HEAD + "jobs:\n- {name: a, model: b}\n", "run.yaml:4 jobs.a.model", "one backbone a run"),
        (HEAD + "jobs:\n- {name: a, output_dir: b}\n", "run.yaml:4 jobs.a.output_dir", "output_dir/NAME"),
        (HEAD + "jobs:\n- {name: a, matrix: {}}\n", "run.yaml:4 jobs.a.matrix", "no matrix of its own"),
        (HEAD + "jobs:\n- {name: a, datasets: d}\n- {name: A, datasets: d}\n", "run.yaml:5 jobs", "two jobs"),
        (HEAD + "defaults: {name: x}\njobs: [{name: a}]\n", "run.yaml:3 defaults.name", "belongs to a job"),
        (JOB + "resume_from_checkpoint: true\n", "run.yaml:4 resume_from_checkpoint", "not a matter of the config"),
    ],
)
def test_a_fault_is_placed_and_worded(text: str, where: str, message: str) -> None:
    error = refusal(text)
    assert message in error.message
    assert error.where == where


def test_unknown_keys_name_the_nearest() -> None:
    assert refusal(JOB + "learning_rte: 1\n").hint == "did you mean 'learning_rate'?"
    assert refusal(JOB + "base_modle: m\n").hint == "did you mean 'base_model'?"
    assert refusal(HEAD + "jobs: [{name: a, lora_rnk: 2}]\n").hint == "did you mean 'lora_rank'?"
    assert refusal(JOB + "peft: {lora_alpa: 2}\n").hint == "did you mean 'lora_alpha'?"


def test_numbers_without_a_dot_are_numbers() -> None:
    job = load(JOB + 'learning_rate: 2e-3\nmax_steps: "1e3"\nlora_alpha: 3.0\n').run.jobs[0]
    assert (job.learning_rate, job.max_steps, job.peft.lora_alpha) == (0.002, 1000, 3)


def test_unreadable_files(folder: Path) -> None:
    for path, message in [("none.yaml", "No such file"), (".", "directory")]:
        with pytest.raises(ConfigError, match=message):
            load_run(path)
    (folder / "latin.yaml").write_bytes(b"a: b\nname: caf\xe9\n")
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        load_run("latin.yaml")
    assert caught.value.where == "latin.yaml:2"


def test_memory_is_read_in_units() -> None:
    sizes = {"8GB": 8 * 10**9, "1.5 GiB": 3 * 2**29, "512mb": 512 * 10**6, "4096": 4096}
    for text, size in sizes.items():
        assert load(JOB + f"memory_limit: {text}\n").run.memory_limit == size
    assert refusal(JOB + f"memory_limit: {'9' * 400}GB\n").where == "run.yaml:4 memory_limit"


@pytest.mark.parametrize(
    ("where", "located"),
    [
        ("jobs.a.peft.target_modules", "run.yaml:4 jobs.a.peft.target_modules"),
        ("jobs.a.b.peft.target_modules", "run.yaml:7 jobs.a.b.peft.target_modules"),
        ("jobs.a.b.max_length", "run.yaml:5 jobs.a.b.max_length"),
        ("jobs.a", "run.yaml:4 jobs.a"),
        ("jobs.c.peft", "jobs.c.peft"),
        ("data.jsonl", "data.jsonl"),
        (None, None),
    ],
)
def test_what_is_found_later_is_told_with_its_line(where: str | None, located: str | None) -> None:
    """Errors of the model and the data name a job's key; the file knows where that was given."""
    jobs = "jobs:\n- {name: a, datasets: d, lora_target: [q_prj]}\n"
    resolved = load(HEAD + jobs + "- name: a.b\n  datasets: d\n  peft: {target_modules: [k_prj]}\n")
    error = DataError("x", where=where)
    for _ in range(2):
        resolved.locate(error)
        assert error.where == located
