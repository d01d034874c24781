"""`data check`: what it finds, what it prints, and that it never raises for bad data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxtune.data.check import check_file
from muxtune.data.dataset import Selection
from tests.data.test_dataset import ByteRenderer, write

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def jsonl(folder: Path, *rows: object) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_good_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"messages": CHAT}, {"messages": CHAT[:1]})
    report = check_file(path)
    assert report.ok and (report.shape, report.examples, report.unanswered.count) == ("messages", 2, 1)
    assert report.lines() == [f"{path}: messages, 2 examples", f"warning: 1 example without an answer: {path} line 2"]
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_bad_file_lists_its_lines(tmp_path: Path) -> None:
    report = check_file(
        jsonl(tmp_path, {"messages": CHAT}, *[{"messages": []}] * 12, {"prompt": "a", "completion": "b"})
    )
    assert not report.ok
    assert report.counts == (("empty_messages", 12), ("other_shape", 1))
    assert [problem.line for problem in report.problems] == list(range(2, 12))
    assert report.lines()[0].endswith("13 bad lines (empty_messages 12, other_shape 1)")
    found = json.loads(json.dumps(report.to_json()))
    assert found["bad_lines"] == {"empty_messages": 12, "other_shape": 1}
    assert found["problems"][0] == {
        "line": 2,
        "code": "empty_messages",
        "message": "field `messages` is empty",
        "clip": '{"messages": []}',
    }


@pytest.mark.parametrize("row", [{"messages": CHAT[:1]}, {"prompt": "a", "completion": ""}, {"text": ""}])
def test_a_file_that_answers_nothing_is_bad(tmp_path: Path, row: object) -> None:
    report = check_file(jsonl(tmp_path, row, row))
    assert not report.ok and "no example has an answer" in report.lines()[0]


def test_missing_and_empty_files_are_reported(tmp_path: Path) -> None:
    assert "no such file" in check_file(str(tmp_path / "none.jsonl")).lines()[0]
    assert "the file is empty" in check_file(jsonl(tmp_path)).lines()[0]


def test_with_a_tokenizer_lengths_and_refusals_are_known(tmp_path: Path) -> None:
    path = write(tmp_path, [("a", "b" * 30), ("a", "b")])
    report = check_file(path, renderer=ByteRenderer(), selection=Selection(10))
    assert report.ok and report.data is not None and report.data.truncated.count == 1
    assert "longest 10" in report.lines()[1]
    refused = write(tmp_path, [("a", "b"), ("a", "refuse")])
    assert check_file(refused).ok
    report = check_file(refused, renderer=ByteRenderer(), selection=Selection(10))
    assert report.counts == (("template", 1),)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120))
def test_it_never_raises(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    report = check_file(str(path))
    assert report.lines() and json.dumps(report.to_json())
