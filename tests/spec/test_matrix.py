"""Grids, draws, exclusions, and the names of what they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.spec import JobSpec
from muxtune.spec.draws import read_draw
from muxtune.spec.tree import Leaf
from muxtune.spec.yaml_tree import parse_yaml
from tests.spec.configs import HEAD, JOB, load

pytestmark = pytest.mark.usefixtures("folder")


def sweep(matrix: str) -> tuple[JobSpec, ...]:
    return load(JOB + f"matrix: {matrix}\n", name="x.yaml").run.jobs


def names(matrix: str) -> list[str]:
    return [job.name for job in sweep(matrix)]


def test_a_grid_is_the_product_in_the_order_of_the_file() -> None:
    jobs = sweep("{grid: {seed: [1, 2], peft.r: [4, 8]}}")
    assert [(job.name, job.seed, job.peft.r) for job in jobs] == [
        ("x-seed1-r4", 1, 4),
        ("x-seed1-r8", 1, 8),
        ("x-seed2-r4", 2, 4),
        ("x-seed2-r8", 2, 8),
    ]


def test_names_say_values_however_they_are_written_and_stay_when_the_grid_grows() -> None:
    small = names("{grid: {lr: [1e-3, 2e-4]}}")
    assert small == names("{grid: {learning_rate: [0.001, 0.0002]}}") == ["x-lr0.001", "x-lr0.0002"]
    assert set(small) < set(names("{grid: {learning_rate: [1e-5, 0.2e-3, 1e-3, 3]}}"))
    assert names("{grid: {learning_rate: [1e-5, 3.0]}}") == ["x-lr1e-5", "x-lr3"]


def test_values_that_are_no_safe_name_get_a_hash() -> None:
    made = names("{grid: {peft.target_modules: [all-linear, [a_b], [a, b]]}}")
    assert made[0] == "x-targets-all-linear"
    assert all(name.startswith("x-targets-a_b-") for name in made[1:])
    assert len(set(made)) == 3


def test_a_value_may_be_a_mapping() -> None:
    jobs = sweep("{grid: {peft: [{r: 2, lora_alpha: 4}, {r: 4, lora_alpha: 8}]}}")
    assert [(job.name, job.peft.lora_alpha) for job in jobs] == [("x-r2-alpha4", 4), ("x-r4-alpha8", 8)]


def test_a_job_may_stay_out() -> None:
    jobs = "jobs: [{name: a}, {name: b, matrix: false}, {name: c, matrix: true}]\n"
    run = load(HEAD + "defaults: {datasets: d}\n" + jobs + "matrix: {grid: {seed: [1, 2]}}\n").run
    assert [job.name for job in run.jobs] == ["a-seed1", "a-seed2", "b", "c-seed1", "c-seed2"]


@pytest.mark.parametrize("nothing", ["false", "null", "~", "no"])
def test_no_matrix(nothing: str) -> None:
    assert names(nothing) == ["x"]


def test_random_draws_stay_when_more_are_drawn_or_varied() -> None:
    rate = "learning_rate: {log_uniform: [1e-4, 1e-2]}"
    four = names(f"{{random: {{samples: 4, seed: 1, {rate}}}}}")
    assert names(f"{{random: {{samples: 9, seed: 1, {rate}}}}}")[:4] == four
    both = names(f"{{random: {{samples: 4, seed: 1, {rate}, peft.r: {{int_uniform: [1, 64]}}}}}}")
    assert [name.rsplit("-r", 1)[0] for name in both] == four
    assert names(f"{{random: {{samples: 4, seed: 2, {rate}}}}}") != four
    assert len(set(four)) == 4


def test_a_drawn_name_says_the_value_in_full() -> None:
    for job in sweep("{random: {samples: 20, learning_rate: {log_uniform: [1e-6, 1e-2]}}}"):
        assert float(job.name.removeprefix("x-lr")) == job.learning_rate


def test_random_over_a_grid_and_keys_drawn_together() -> None:
    jobs = sweep('{grid: {seed: [1, 2]}, random: {samples: 3, "peft.r,peft.lora_alpha": {choice: [[4, 8], [8, 16]]}}}')
    assert {(job.seed, job.peft.r, job.peft.lora_alpha) for job in jobs} <= {
        (seed, r, 2 * r) for seed in (1, 2) for r in (4, 8)
    }
    assert len({job.name for job in jobs}) == len(jobs)  # equal draws are one job


def test_exclude_compares_values_not_text() -> None:
    kept = names("{grid: {lr: [1e-3, 2e-3], seed: [1, 2]}, exclude: [{learning_rate: 0.0020, seed: 1}]}")
    assert kept == ["x-lr0.001-seed1", "x-lr0.001-seed2", "x-lr0.002-seed2"]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ("{}", "varies nothing"),
        ("{grid: {}}", "varies nothing"),
        ("{gird: {seed: [1]}}", "unknown key 'gird'"),
        ("{grid: {seed: []}}", "has no values"),
        ("{grid: {seed: 3}}", "should be a list"),
        ("{grid: {sed: [1]}}", "unknown key 'sed'"),
        ("{grid: {base_model: [a]}}", "one backbone a run"),
        ("{grid: {name: [a, b]}}", "name cannot vary"),
        ("{grid: {seed: [1, 01]}}", "two jobs would be named"),
        ("{grid: {lr: [1], learning_rate: [2]}}", "learning_rate varies twice"),
        ("{grid: {seed: [1]}, random: {samples: 1, seed: 1, seed2: {choice: [1]}}}", "unknown key 'seed2'"),
        ('{grid: {"seed,max_steps": [[1, 2], [3]]}}', "lists of 2 values"),
        ("{grid: {seed: [1, x]}}", "should be a number"),
        ("{grid: {peft.r: [8, 0]}}", "at least 1"),
        ("{grid: {seed: [1, 2]}, exclude: [{max_steps: 1}]}", "does not vary"),
        ("{grid: {seed: [1, 2]}, exclude: [{seed: 3}]}", "excludes nothing"),
        ("{grid: {seed: [1]}, exclude: [{seed: 1}]}", "excludes every point"),
        ("{grid: {seed: [1]}, exclude: [{}]}", "an empty rule"),
        ("{random: {seed: 1}}", "whole number"),
        ("{random: {samples: 2}}", "draws nothing"),
        ("{random: {samples: 0, lr: {choice: [1]}}}", "from 1 to"),
        ("{random: {samples: 1e9, lr: {choice: [1]}}}", "from 1 to"),
        ("{random: {samples: 2, lr: [1, 2]}}", "one way to draw"),
        ("{random: {samples: 2, lr: {normal: [1, 2]}}}", "unknown key 'normal'"),
        ("{random: {samples: 2, lr: {uniform: [2, 1]}}}", "low below high"),
        ("{random: {samples: 2, lr: {uniform: [1, 2, 3]}}}", "low below high"),
        ("{random: {samples: 2, lr: {log_uniform: [0, 1]}}}", "above 0"),
        ("{random: {samples: 2, lr: {int_uniform: [1, 2.5]}}}", "whole numbers"),
        ("{halving: {keep: 0.5}}", "not supported yet"),
        ("[1]", "mapping"),
    ],
)
def test_faults(matrix: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        sweep(matrix)
    assert caught.value.where is not None and caught.value.where.startswith("x.yaml:4")


def test_a_bomb_of_values_is_refused_before_it_is_made() -> None:
    hundred = ", ".join(map(str, range(1, 101)))
    axes = ", ".join(f"{key}: [{hundred}]" for key in ("seed", "max_steps", "peft.r", "save_steps", "max_length"))
    with pytest.raises(ConfigError, match="more than 4096 points"):
        sweep(f"{{grid: {{{axes}}}}}")
    jobs = "".join(f"- {{name: j{i}, datasets: a}}\n" for i in range(60))
    with pytest.raises(ConfigError, match="60 jobs at 100 points"):
        load(HEAD + f"jobs:\n{jobs}matrix: {{grid: {{seed: [{hundred}]}}}}\n")


@given(st.sampled_from(["uniform", "log_uniform", "int_uniform"]), st.integers(0, 50), st.integers(1, 1000))
def test_draws_stay_in_their_bounds(kind: str, seed: int, span: int) -> None:
    node = parse_yaml(f"{{{kind}: [3, {3 + span}]}}", "f")
    assert node is not None
    draw = read_draw(node, "at")
    for index in range(20):
        leaf = draw(seed, "key", index)
        assert isinstance(leaf, Leaf) and leaf.text is not None
        assert 3 <= float(leaf.text) <= 3 + span
        assert leaf == draw(seed, "key", index)


def test_draws_reach_both_ends() -> None:
    node = parse_yaml("{int_uniform: [1, 3]}", "f")
    assert node is not None
    draw = read_draw(node, "at")
    drawn = [draw(0, "key", index) for index in range(60)]
    assert {leaf.text for leaf in drawn if isinstance(leaf, Leaf)} == {"1", "2", "3"}
