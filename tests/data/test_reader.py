"""Reading data files: what is accepted, what is refused, and that every refusal names its line."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from muxtune.data import lines
from muxtune.data.lines import file_sha256
from muxtune.data.problems import CLIP_CHARS, DataFileError
from muxtune.data.reader import ExampleReader, read_examples
from muxtune.data.types import Message
from muxtune.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {"prompt": "2+2=", "completion": "4"}
REAL = Path(__file__).parents[3] / "shared" / "data"


def write(folder: Path, content: str | bytes, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def refused(path: str) -> DataFileError:
    with pytest.raises(DataFileError) as caught:
        read_examples(path)
    return caught.value


def only_problem(path: str) -> tuple[int, str]:
    (problem,) = refused(path).problems
    return problem.line, problem.code


def test_lines_keep_their_number_past_blank_ones(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl(CHAT) + "\n  \n" + jsonl(CHAT))
    assert [item.line for item in read_examples(path)] == [1, 4]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "newline"])
def test_line_ends_and_byte_order_mark_change_nothing(tmp_path: Path, newline: str, last: str) -> None:
    text = newline.join([json.dumps(CHAT), json.dumps(CHAT)]) + (newline if last else "")
    plain = read_examples(write(tmp_path, jsonl(CHAT, CHAT)))
    assert read_examples(write(tmp_path, b"\xef\xbb\xbf" + text.encode())) == plain


def test_unicode_line_separators_inside_a_string_end_no_line(tmp_path: Path) -> None:
    row = {"text": "a\u2028b\u0085c\x0bd"}
    (item,) = read_examples(write(tmp_path, json.dumps(row, ensure_ascii=False).replace("\x0b", "\\u000b")))
    assert item.completion == "a\u2028b\u0085c\x0bd"


@pytest.mark.parametrize("layout", [None, 1])
def test_an_array_in_jsonl_is_refused_by_line(tmp_path: Path, layout: int | None) -> None:
    error = refused(write(tmp_path, json.dumps([CHAT, CHAT], indent=layout)))
    assert "file is a JSON array, expected one object per line (line 1)" in str(error)
    assert error.counts == {"json_array": 1}


def test_an_array_in_a_later_line_is_that_lines_fault(tmp_path: Path) -> None:
    assert only_problem(write(tmp_path, jsonl(CHAT, [CHAT], CHAT))) == (2, "json_array")


@pytest.mark.parametrize("layout", [None, 2])
def test_a_json_array_file_reads_like_lines(tmp_path: Path, layout: int | None) -> None:
    items = read_examples(write(tmp_path, json.dumps([CHAT, CHAT], indent=layout), "data.json"))
    expected = read_examples(write(tmp_path, jsonl(CHAT, CHAT)))
    assert [item.messages for item in items] == [item.messages for item in expected]
    assert [item.line for item in items] == ([1, 1] if layout is None else [2, 14])


def test_a_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    assert len(read_examples(write(tmp_path, jsonl(CHAT, CHAT), "data.json"))) == 2


@pytest.mark.parametrize(
    "text", ["[", "[{}", '[{"text": "a"},]', '[{"text": "a"} {"text": "b"}]', '[{"text": "a"}] x', "[,]", "[]]"]
)
def test_a_broken_array_names_one_line(tmp_path: Path, text: str) -> None:
    error = refused(write(tmp_path, text, "data.json"))
    assert error.counts.get("not_json") == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"])
@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_an_empty_file_says_so(tmp_path: Path, content: bytes, name: str) -> None:
    with pytest.raises(DataError, match="the file is empty"):
        read_examples(write(tmp_path, content, name))


def test_an_empty_array_is_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file is empty"):
        read_examples(write(tmp_path, " [ ] ", "data.json"))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"text": "a", "text": "b"}', "duplicate_key"),
        ('{"text": "a", "meta": {"k": 1, "k": 1}}', "duplicate_key"),
        ('{"text": "a", "x": NaN}', "not_finite"),
        ('{"text": "a", "x": -Infinity}', "not_finite"),
        ('{"text": "a", "x": 1e999}', "number_too_large"),
        ('{"text": "a", "x": ' + "9" * 5000 + "}", "number_too_large"),
        ('{"text": "a", "x": ' + "[" * 100 + "]" * 100 + "}", "too_deep"),
        ('{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "too_deep"),
        ('{"text": "a", "x": ' + '{"k":' * 5000 + "1" + "}" * 5000 + "}", "too_deep"),
        ('{"text": "\\ud800"}', "lone_surrogate"),
        ('{"text": "a", "\\udc00": 1}', "lone_surrogate"),
        ('{"text": "a"', "not_json"),
        ('{"text": "a"} {"text": "b"}', "not_json"),
        ("{'text': 'a'}", "not_json"),
        ("text", "not_json"),
        ('{"text": "a\tb"}', "not_json"),
        ('"text"', "not_object"),
        ("17", "not_object"),
        ("null", "not_object"),
        ('{"text": 5}', "wrong_type"),
        ('{"text": null}', "wrong_type"),
        ("{}", "missing_field"),
    ],
)
def test_a_bad_line_is_refused_by_code_and_line(tmp_path: Path, line: str, code: str) -> None:
    good = '{"text": "fine"}'
    assert only_problem(write(tmp_path, f"{good}\n{line}\n{good}\n")) == (2, code)


def test_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    (item,) = read_examples(write(tmp_path, '{"text": "\\ud83d\\ude00"}'))
    assert item.completion == "\U0001f600"


def test_bytes_that_are_no_utf8_are_refused_by_line(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"text": "a"}\n{"text": "\xff"}\n')
    assert only_problem(path) == (2, "not_utf8")
    array = write(tmp_path, b'[{"text": "a"},\n{"text": "\xff"}]\n', "data.json")
    assert only_problem(array) == (2, "not_utf8")


def test_a_line_over_the_cap_is_skipped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    long = jsonl({"text": "x" * 1000})
    error = refused(write(tmp_path, jsonl({"text": "a"}) + long + jsonl({"text": "b"}) + "x" * 500))
    assert [(problem.line, problem.code) for problem in error.problems] == [(2, "line_too_long"), (4, "line_too_long")]


@pytest.mark.parametrize(
    ("head", "name"), [(b"\x1f\x8b\x08", "gzip"), (b"PK\x03\x04", "zip"), (b"PAR1", "Parquet"), (b"\xff\xfe", "UTF-16")]
)
def test_other_formats_are_named(tmp_path: Path, head: bytes, name: str) -> None:
    with pytest.raises(DataError, match=name):
        read_examples(write(tmp_path, head + b"\x00" * 40))


def test_missing_files_folders_and_pipes_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (str(tmp_path / "none.jsonl"), "no such file"),
        (str(tmp_path), "not a regular file"),
        (str(tmp_path / "pipe"), "not a regular file"),
        ("nul\0byte", "not a usable path"),
    ]:
        with pytest.raises(DataError, match=message):
            read_examples(path)


def test_all_bad_lines_are_counted_and_the_first_ten_shown(tmp_path: Path) -> None:
    rows = [CHAT if number % 2 else {"messages": []} for number in range(30)]
    error = refused(write(tmp_path, jsonl(CHAT, *rows) + "oops\n"))
    assert [problem.line for problem in error.problems] == list(range(2, 22, 2))
    assert error.counts == {"empty_messages": 15, "not_json": 1}
    assert "16 bad lines (empty_messages 15, not_json 1)" in str(error)
    assert "... and 6 more" in str(error)


def test_clips_are_for_the_user_only(tmp_path: Path) -> None:
    secret = "my-secret"
    row = {"messages": [{"role": secret + " ", "content": "\x1b[31m" + secret * 40}], secret + "!": 1}
    error = refused(write(tmp_path, json.dumps(row, ensure_ascii=False).replace("\x1b", "\\u001b") + "\x1b]0;x\n"))
    assert secret in str(error)
    assert secret not in error.message
    assert "\x1b" not in str(error)
    assert all(len(problem.clip) <= CLIP_CHARS for problem in error.problems)


def test_the_error_crosses_process_borders_whole(tmp_path: Path) -> None:
    error = refused(write(tmp_path, jsonl(CHAT, {"messages": []})))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.counts, copy.problems) == (str(error), error.counts, error.problems)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_the_digest_is_of_the_whole_file(tmp_path: Path, name: str) -> None:
    for content in (jsonl(CHAT, CHAT), json.dumps([CHAT] * 3), "[\n" * 500, ""):
        path = write(tmp_path, content, name)
        reader = ExampleReader(path)
        list(reader)
        assert reader.sha256 == file_sha256(path)


def test_batches_are_bounded_in_count_and_size(tmp_path: Path) -> None:
    rows = [{"text": "x" * (1000 if number == 3 else 1)} for number in range(8)]
    path = write(tmp_path, jsonl(*rows))
    batches = [len(batch) for batch in ExampleReader(path).batches(examples=3, size=500)]
    assert batches == [3, 1, 3, 1]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), name=st.sampled_from(["data.jsonl", "data.json"]))
@example(content=b"[" * 3000, name="data.json")
@example(content=b'{"a":' * 3000, name="data.jsonl")
def test_no_bytes_do_anything_but_read_or_raise_data_error(tmp_path: Path, content: bytes, name: str) -> None:
    try:
        read_examples(write(tmp_path, content, name))
    except DataError as error:
        assert error.where is not None


GOOD = jsonl(
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "sun", "tool_call_id": "1"},
            {"role": "assistant", "content": "Sun.", "weight": 1},
        ],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
    },
    CHAT,
).encode()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, len(GOOD) - 1),
    cut=st.integers(0, 12),
    insert=st.one_of(st.binary(max_size=4), st.sampled_from([b"null", b"[]", b"{}", b"1e999", b'"', b"\\ud800", b","])),
)
@example(at=0, cut=0, insert=b"\xff\xfe")
def test_an_edited_good_file_reads_or_names_a_line_of_it(tmp_path: Path, at: int, cut: int, insert: bytes) -> None:
    content = GOOD[:at] + insert + GOOD[at + cut :]
    try:
        items = read_examples(write(tmp_path, content))
    except DataFileError as error:
        count = content.count(b"\n") + 1
        assert all(1 <= problem.line <= count for problem in error.problems)
    except DataError as error:  # no line is to blame where the first bytes are those of another format
        assert at == 0 and "expected UTF-8 text" in error.message
    else:
        assert all(isinstance(message, Message) for item in items for message in item.messages)


@pytest.mark.skipif(not REAL.is_dir(), reason="the folder of real data sets is not part of a checkout")
@pytest.mark.parametrize("folder", ["banking77", "gsm8k", "openbookqa", "rte", "sst2"])
def test_real_data_sets_read_whole(folder: str) -> None:
    train, test = (read_examples(str(REAL / folder / f"{part}.jsonl")) for part in ("train", "test"))
    assert (len(train), len(test)) == (2000, 200)
    assert {item.shape for item in (*train, *test)} == {"messages"}
    assert all([message.role for message in item.messages] == ["user", "assistant"] for item in train)
