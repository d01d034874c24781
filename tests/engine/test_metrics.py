"""Metrics files: what trackers read, and no step twice whatever a crash left."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from muxtune.engine.metrics import COLUMNS, MetricsFiles, columns_of, eval_row, step_row
from muxtune.spec.event import EvalResult, Rewards, StepResult


def step(number: int, **changes: object) -> StepResult:
    values = {"loss": 1 / number, "lr": 1e-3, "grad_norm": 0.5, "accuracy": 0.25, "time_s": 0.1, **changes}
    return StepResult("a", number, tokens=7, input_tokens=20, epoch=number / 3, **values)  # type: ignore[arg-type]


@pytest.fixture
def files(disk: Path) -> MetricsFiles:
    """Steps 1 to 4, an evaluation after each second one."""
    found = MetricsFiles(disk)
    for number in range(1, 5):
        found.append(step_row(step(number)))
        if number % 2 == 0:
            found.append(eval_row(EvalResult("a", number, 2.0, 0.5, 30)))
    return found


def steps(folder: Path) -> list[int]:
    """As any tool would read them; the two files must agree."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [{key: float(value) for key, value in line.items() if value} for line in table] == rows
    return [row["train/global_step"] for row in rows]


def test_rows_of_dpo_have_rewards_by_the_names_of_trl(disk: Path) -> None:
    files = MetricsFiles(disk, columns_of("dpo"))
    files.append(step_row(step(1, rewards=Rewards(chosen=0.5, rejected=-0.25))))
    files.append(eval_row(EvalResult("a", 1, 2.0, 0.75, 30, Rewards(math.nan, 1.0))))
    first, evaluated = files.rows()
    found = {key: value for key, value in first.items() if "rewards" in key}
    assert found == {
        "train/rewards/accuracies": first["train/rewards/accuracies"],
        "train/rewards/chosen": 0.5,
        "train/rewards/rejected": -0.25,
        "train/rewards/margins": 0.75,
    }
    assert evaluated["eval/rewards/accuracies"] == 0.75 and evaluated["eval/rewards/margins"] is None
    assert not any("token_accuracy" in key for key in (*first, *evaluated, *columns_of("dpo")))
    files.cut(1)
    assert (disk / "metrics.csv").read_text().splitlines()[0] == ",".join(columns_of("dpo"))
    assert len(files.rows()) == 2


def test_rows_are_what_trackers_know(files: MetricsFiles, disk: Path) -> None:
    assert steps(disk) == [1, 2, 2, 3, 4, 4]
    assert (disk / "metrics.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    first, _, evaluated = files.rows()[:3]
    assert (first["train/loss"], first["train/num_trained_tokens"], first["train/num_input_tokens"]) == (1.0, 7, 20)
    assert evaluated == {
        "train/global_step": 2,
        "eval/loss": 2.0,
        "eval/token_accuracy": 0.5,
        "eval/num_trained_tokens": 30,
    }


@pytest.mark.parametrize(("to", "left"), [(4, [1, 2, 2, 3, 4, 4]), (3, [1, 2, 2, 3]), (2, [1, 2, 2]), (0, [])])
def test_cut_back_to_a_checkpoint(to: int, left: list[int], files: MetricsFiles, disk: Path) -> None:
    files.cut(to)
    assert steps(disk) == left
    for number in range(to + 1, 6):
        files.append(step_row(step(number)))
    trained = [row["train/global_step"] for row in files.rows() if "train/loss" in row]
    assert trained == [1, 2, 3, 4, 5]
    steps(disk)


def test_a_last_line_torn_anywhere_is_dropped(files: MetricsFiles, disk: Path) -> None:
    files.cut(3)
    whole = (disk / "metrics.jsonl").read_bytes()
    files.append(step_row(step(4)))
    lines, table = ((disk / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv"))
    for size in range(len(whole), len(lines)):
        (disk / "metrics.jsonl").write_bytes(lines[:size])
        (disk / "metrics.csv").write_bytes(table[: size % len(table)])  # torn at another place
        files.cut(4)
        assert steps(disk) == [1, 2, 2, 3]
        assert (disk / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 300, b"\xff\xfe\n", b"[1]\n", b'{"train/global_step": "9"}\n', b"{}\n"])
def test_a_tail_that_is_no_row_is_dropped(tail: bytes, files: MetricsFiles, disk: Path) -> None:
    with open(disk / "metrics.jsonl", "ab") as file:
        file.write(tail)
    files.cut(4)
    assert steps(disk) == [1, 2, 2, 3, 4, 4]


def test_there_may_be_nothing_yet(disk: Path) -> None:
    files = MetricsFiles(disk)
    assert files.rows() == []
    files.sync()
    files.cut(3)
    assert steps(disk) == []
    files.append(step_row(step(1)))
    files.sync()
    assert steps(disk) == [1]


def test_json_has_no_nan(disk: Path) -> None:
    files = MetricsFiles(disk)
    files.append(eval_row(EvalResult("a", 1, math.nan, 0.0, 30)))
    files.append(step_row(step(2, grad_norm=math.inf)))
    text = (disk / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [json.loads(line).get("eval/loss", 0) for line in text.splitlines()] == [None, 0]
    files.cut(2)
    assert [row["train/global_step"] for row in files.rows()] == [1, 2]
