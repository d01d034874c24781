"""`--set` over a file."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec import RunSpec
from tests.spec.configs import HALVING, IA3_JOB, SWEEP, THREE, load

pytestmark = pytest.mark.usefixtures("folder")
TWO = THREE.replace(IA3_JOB, "")
NINE = SWEEP.replace(HALVING, "")


def run(*sets: str) -> RunSpec:
    return load(TWO, *sets).run


def test_every_job_or_one() -> None:
    assert [job.seed for job in run("seed=3").jobs] == [3, 3]
    assert [job.seed for job in run("jobs.shell.seed=3").jobs] == [7, 3]
    assert [job.seed for job in run("jobs.shell.seed=3", "seed=4").jobs] == [4, 3]
    assert [job.seed for job in run("seed=4", "seed=5").jobs] == [5, 5]


def test_keys_of_the_run() -> None:
    assert run("output_dir=elsewhere", "device=cpu", "model=m2").base_model == "m2"
    assert run("output_dir=elsewhere").output_dir == "elsewhere"


def test_values_are_yaml_and_merge_like_a_job() -> None:
    assert [job.peft.r for job in run("peft.r=3").jobs] == [3, 3]
    assert [job.peft.lora_alpha for job in run("peft={r: 3}").jobs] == [16, 32]
    assert [job.peft.lora_alpha for job in run("lora_alpha=1e1").jobs] == [10, 10]
    assert [job.max_steps for job in run("max_steps=").jobs] == [None, None]
    assert run("jobs.sql.datasets=[x.jsonl, {path: y, type: text}]").jobs[0].datasets[1].type == "text"


def test_names_with_dots_and_members_of_a_sweep() -> None:
    resolved = load(NINE, "jobs.sql-lr0.001-r8-alpha16.seed=5", "jobs.sql.max_steps=6", name="sweep.yaml")
    seeds = {job.name: job.seed for job in resolved.run.jobs}
    assert [name for name, seed in seeds.items() if seed == 5] == ["sql-lr0.001-r8-alpha16"]
    assert {job.max_steps for job in resolved.run.jobs} == {6}


def test_the_matrix_can_be_turned_off_or_changed() -> None:
    assert [job.name for job in load(NINE, "matrix=false").run.jobs] == ["sql"]
    grown = load(SWEEP, "matrix.halving=null", "matrix.grid.learning_rate=[2e-3]", "matrix.exclude=null").run
    assert len(grown.jobs) == 3


@pytest.mark.parametrize(
    ("setting", "where", "message"),
    [
        ("seed", "--set seed", "KEY=VALUE"),
        ("=3", "--set =3", "KEY=VALUE"),
        ("a..b=3", "--set a..b=3", "KEY=VALUE"),
        ("sed=3", "--set sed", "unknown key 'sed'"),
        ("seed=x", "--set seed jobs.sql.seed", "should be a number"),
        ("seed=[", "--set seed", "not YAML"),
        ("jobs.sqll.seed=3", "--set jobs.sqll.seed", "names no job"),
        ("jobs.sql=3", "--set jobs.sql", "names no job"),
        ("jobs=[]", "--set jobs", "cannot be set"),
        ("defaults.seed=3", "--set defaults.seed", "cannot be set"),
        ("name=x", "--set name", "cannot be set"),
        ("jobs.sql.matrix=false", "--set jobs.sql.matrix", "cannot be set"),
        ("jobs.sql.base_model=x", "--set jobs.sql.base_model jobs.sql.base_model", "one backbone"),
        ("datasets.0.path=x", "--set datasets.0.path jobs.sql.datasets.0.0", "unknown key"),
        ("policy=fast", "--set policy policy", "should be one of"),
    ],
)
def test_faults(setting: str, where: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(setting)
    assert message in caught.value.message
    assert caught.value.where == where


def test_what_the_matrix_varies_cannot_be_set() -> None:
    for setting in ("lr=1", "peft={r: 3}", "jobs.sql.peft.r=2", "jobs.sql-lr0.001-r8-alpha16.lora_rank=2"):
        with pytest.raises(ConfigError, match="varied by the matrix"):
            load(NINE, setting)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean jobs\.sql\?"):
        run("jobs.sqll.seed=3")
