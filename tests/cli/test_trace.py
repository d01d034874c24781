"""`muxtune trace`: what a run's rounds were made of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from muxtune.engine.trace_file import FOLDER, TraceFile, read_traces
from muxtune.plan.types import RoundRecord, RoundSchedule
from tests.cli.projects import rows
from tests.cli.shell import Shell


def test_the_rounds_of_a_run(shell: Shell, trained: Path) -> None:
    ended = shell.run("trace", str(trained), "--json")
    assert ended.code == 0
    totals = json.loads(ended.out)
    folders = [path.parent for path in trained.glob("*/metrics.jsonl")]
    steps = [row for folder in folders for row in rows(folder) if "train/loss" in row]
    assert len(folders) > 1 and totals["steps"] == len(steps) > 0
    seen = sum(row["train/num_input_tokens"] for row in steps)
    records = list(read_traces(trained))
    trained_items = [item for one in records for action in one.actions for item in action.items if item.kind == "train"]
    assert sum(item.input_tokens for item in trained_items) == seen
    assert totals["rows"] >= totals["tokens"] > seen and 0 <= totals["ineffective"] < 0.2  # tiny passes, of 16s
    table = shell.run("trace", str(trained), "-n", "3").out.splitlines()
    assert table[0].split() == ["round", "what", "passes", "widest", "rows", "tokens", "unused", "steps", "s"]
    assert len(table) == 6 and f"{totals['steps']} optimizer steps" in table[-2]
    assert totals["plans"] == 1
    assert re.fullmatch(
        r"1 plan, the last: (chat \| sql|sql \| chat|chat sql|sql chat), [\d.]+ s an iteration predicted", table[-1]
    )


def test_a_folder_without_a_run(shell: Shell, project: Path) -> None:
    ended = shell.run("trace", str(project))
    assert ended.code == 2 and "no rounds are recorded here" in ended.err and "Traceback" not in ended.err


def test_a_line_that_was_cut_off_is_passed_over_and_each_process_has_its_own_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        with TraceFile.begin(tmp_path) as trace:
            trace.append(RoundRecord(RoundSchedule(number, ()), (), 0.5))
    with open(trace.path, "a", encoding="utf-8") as file:
        file.write('{"schedule":{"round":7,"act')
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    assert [record.schedule.round for record in read_traces(tmp_path)] == [0, 1]
    assert f"{trace.path}: 1 line is cut off or damaged and passed over" in caplog.text


def test_a_folder_that_cannot_be_written_ends_the_trace_not_the_run(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    with TraceFile.begin(tmp_path) as trace:
        trace.append(RoundRecord(RoundSchedule(0, ()), (), 0.5))
    assert list(read_traces(tmp_path)) == []
