"""`config print`: every value with its origin, and a config again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxtune.spec import JobSpec, ResolvedRun, RunSpec, load_run, render_json, render_yaml
from muxtune.spec.tree import Table
from tests.spec.configs import HALVING, IA3_JOB, SWEEP, THREE, load, write
from tests.spec.specs import jobs

pytestmark = pytest.mark.usefixtures("folder")
TWO = THREE.replace(IA3_JOB, "")


def origins(resolved: ResolvedRun) -> dict[str, str]:
    found: dict[str, str] = json.loads(render_json(resolved))["origins"]
    return found


def test_origins() -> None:
    found = origins(load(TWO, "seed=9", "jobs.shell.lr=1e-5", "device=cpu", name="three.yaml"))
    assert {
        "base_model": "three.yaml:2",
        "device": "--set device",
        "threads": "default",
        "jobs.sql.name": "three.yaml:13",
        "jobs.sql.peft.r": "three.yaml:5 (defaults)",
        "jobs.sql.peft.lora_dropout": "default",
        "jobs.sql.datasets.0.path": "three.yaml:14",
        "jobs.sql.datasets.0.type": "default",
        "jobs.sql.validation.eval_steps": "three.yaml:15",
        "jobs.sql.seed": "--set seed",
        "jobs.sql.learning_rate": "three.yaml:7 (defaults)",
        "jobs.shell.peft.r": "three.yaml:18",
        "jobs.shell.peft.type": "three.yaml:5 (defaults)",
        "jobs.shell.learning_rate": "--set jobs.shell.lr (alias lr)",
    }.items() <= found.items()


def test_origins_of_a_sweep_and_of_a_flat_file() -> None:
    found = origins(load(SWEEP.replace(HALVING, ""), name="sweep.yaml"))
    assert found["jobs.sql-lr0.001-r8-alpha16.learning_rate"] == "sweep.yaml:11 (matrix)"
    assert found["jobs.sql-lr0.001-r8-alpha16.peft.r"] == "sweep.yaml:12 (matrix)"
    assert found["jobs.sql-lr0.001-r8-alpha16.max_steps"] == "sweep.yaml:7 (defaults)"
    flat = origins(load("model: m\noutput_dir: o\ndatasets: [a]\n", name="flat.yaml"))
    assert flat["base_model"] == "flat.yaml:1 (alias model)"
    assert flat["jobs.flat.name"] == "flat.yaml (the file's name)"
    assert flat["jobs.flat.datasets.0.path"] == "flat.yaml:3"


def test_what_a_short_name_sets_comes_from_the_name() -> None:
    text = "model: m\noutput_dir: o\ndefaults: {datasets: a, peft: {type: dora, r: 4}}\njobs:\n"
    text += "  - name: a\n  - {name: b, adapter: PiSSA}\n  - {name: c, peft: parallel}\n"
    text += "  - {name: d, peft: {type: dora, use_dora: yes}}\n  - {name: e, peft: {type: lora}}\n"
    found = origins(load(text, name="short.yaml"))
    assert {
        "jobs.a.peft.type": "short.yaml:3 (defaults)",
        "jobs.a.peft.use_dora": "short.yaml:3 (defaults, type dora)",
        "jobs.a.peft.use_rslora": "default",
        "jobs.b.peft.init_lora_weights": "short.yaml:6 (alias adapter, type PiSSA)",
        "jobs.b.peft.use_dora": "default",
        "jobs.c.peft.placement": "short.yaml:7 (type parallel)",
        "jobs.d.peft.use_dora": "short.yaml:8",
        "jobs.e.peft.use_dora": "default",
    }.items() <= found.items()


def test_json_holds_the_run() -> None:
    resolved = load(TWO)
    assert RunSpec.model_validate(json.loads(render_json(resolved))["run"]) == resolved.run


def test_yaml_says_each_value_once_with_its_origin() -> None:
    lines = render_yaml(load(TWO, name="three.yaml")).splitlines()
    assert lines[0].split() == ["base_model:", "smollm2-135m-instruct", "#", "three.yaml:2"]
    assert sum("learning_rate: 0.002" in line and "# three.yaml:7 (defaults)" in line for line in lines) == 1
    assert any("max_length" in line and "three.yaml:6" in line for line in lines)
    assert any("save_steps: null" in line and "default: every epoch" in line for line in lines)
    assert all("#" in line or line.rstrip().endswith(":") for line in lines)


def test_yaml_is_a_config_again() -> None:
    for text in (TWO, SWEEP.replace(HALVING, "")):
        run = load(text, "device=cpu").run
        assert load_run(write(Path(), render_yaml(load(text, "device=cpu")), "again.yaml").name).run == run


def _from_nowhere(path: str) -> bool:
    return not path.startswith("~") and str(Path(path)) == path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(jobs(), min_size=1, max_size=2, unique_by=lambda job: job.name.casefold()))
def test_any_run_survives_yaml(some: list[JobSpec]) -> None:
    given_paths = [d.path for job in some for d in job.datasets]
    given_paths += [job.validation.path for job in some if job.validation]
    run = RunSpec(base_model="m", output_dir="o", jobs=tuple(some))
    text = render_yaml(ResolvedRun(run, Table()))
    yaml.safe_load(text)
    if all(_from_nowhere(path) for path in given_paths):
        assert load_run(write(Path(), text)).run == run


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "a\nb", "\x07", "é😀", "it's", 'say "x"', " ", "#", "- a"])
def test_odd_text_survives_yaml(text: str) -> None:
    job = JobSpec(name="a", datasets=("x",), sample_prompts=(text, "plain"))  # type: ignore[arg-type]
    run = RunSpec(base_model="m", output_dir="o", jobs=(job,))
    assert load_run(write(Path(), render_yaml(ResolvedRun(run, Table())))).run == run
