"""What each shape of line becomes, and that a file's shape is decided once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muxtune.data.problems import DataFileError
from muxtune.data.reader import ExampleReader, read_examples
from muxtune.data.shapes import resolve_type, teaches
from muxtune.data.types import Example, Message, Shape
from muxtune.errors import ConfigError

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}
ALPACA = {"instruction": "Say hi", "output": "hi"}
PAIR = {"prompt": "a", "completion": "b"}
IN_OUT = {"input": "a", "output": "b"}
TEXT = {"text": "words"}


def read(folder: Path, *rows: object, declared: Shape | None = None) -> tuple[Example, ...]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(str(path), declared)


def problem(folder: Path, *rows: object, declared: Shape | None = None) -> tuple[int, str, str]:
    with pytest.raises(DataFileError) as caught:
        read(folder, *rows, declared=declared)
    first = caught.value.problems[0]
    return first.line, first.code, first.message


def turn(folder: Path, **fields: object) -> Message:
    """The Message of one assistant turn with these fields."""
    (item,) = read(folder, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **fields}]})
    return item.messages[1]


def refused_turn(folder: Path, **fields: object) -> tuple[str, str]:
    _, code, message = problem(folder, MESSAGES, {"messages": [{"role": "assistant", **fields}]})
    return code, message


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (MESSAGES, "messages"),
        (SHAREGPT, "sharegpt"),
        (ALPACA, "alpaca"),
        (PAIR, "prompt_completion"),
        (IN_OUT, "prompt_completion"),
        (TEXT, "text"),
        ({**ALPACA, "input": "", "text": "Below is an instruction"}, "alpaca"),
        ({**MESSAGES, "id": 7, "source": None}, "messages"),
    ],
)
def test_the_shape_is_detected(tmp_path: Path, row: dict[str, object], shape: Shape) -> None:
    (item,) = read(tmp_path, row)
    assert item.shape == shape


@pytest.mark.parametrize(
    "row", [{**MESSAGES, **PAIR}, {**MESSAGES, **SHAREGPT}, {**PAIR, **ALPACA}, {**PAIR, **IN_OUT}]
)
def test_a_line_of_two_shapes_is_not_guessed(tmp_path: Path, row: dict[str, object]) -> None:
    assert problem(tmp_path, row)[:2] == (1, "ambiguous_shape")


def test_the_user_decides_between_two_shapes(tmp_path: Path) -> None:
    both = {**MESSAGES, **PAIR}
    assert read(tmp_path, both, declared="messages")[0].messages
    assert read(tmp_path, both, declared="prompt_completion")[0].prompt == "a"


def test_the_first_line_decides_and_another_shape_is_an_error_of_its_line(tmp_path: Path) -> None:
    for first in (MESSAGES, SHAREGPT, ALPACA, PAIR, IN_OUT, TEXT):
        for other in (MESSAGES, SHAREGPT, ALPACA, PAIR, IN_OUT, TEXT):
            if other is not first:
                line, code, message = problem(tmp_path, first, first, other)
                assert (line, code) == (3, "other_shape"), (first, other)
                assert "the file is" in message


def test_a_line_that_turns_ambiguous_half_way_is_an_error(tmp_path: Path) -> None:
    assert problem(tmp_path, TEXT, {**TEXT, **MESSAGES})[:2] == (2, "other_shape")
    assert problem(tmp_path, MESSAGES, {**PAIR, **MESSAGES})[:2] == (2, "other_shape")


def test_a_bad_first_line_does_not_decide(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('oops\n{"foo": 1}\n' + json.dumps(TEXT) + "\n" + json.dumps(PAIR) + "\n")
    reader = ExampleReader(str(path))
    assert [record.example.line for record in reader] == [3]
    assert [(item.line, item.code) for item in reader.problems.first] == [
        (1, "not_json"),
        (2, "unknown_shape"),
        (4, "other_shape"),
    ]


def test_unknown_keys_are_listed_with_the_shapes_there_are(tmp_path: Path) -> None:
    line, code, message = problem(tmp_path, {"question": "a", "answer": "b"})
    assert (line, code) == (1, "unknown_shape")
    assert "`question`, `answer`" in message and "prompt_completion (prompt, completion)" in message


def test_a_field_that_is_no_string_is_named(tmp_path: Path) -> None:
    line, code, message = problem(tmp_path, ALPACA, ALPACA, {"instruction": 5, "output": "x"})
    assert (line, code, message) == (3, "wrong_type", "field `instruction`: expected string, got number")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("messages", "messages"),
        ("chat_template", "messages"),
        ("openai", "messages"),
        ("prompt_completion", "prompt_completion"),
        ("input_output", "prompt_completion"),
        ("alpaca", "alpaca"),
        ("sharegpt", "sharegpt"),
        ("text", "text"),
        ("preference", "preference"),
        (None, None),
    ],
)
def test_types_and_their_aliases(name: str | None, shape: Shape | None) -> None:
    assert resolve_type(name) == shape


def test_type_completion_is_refused_with_both_suggestions() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_type("completion")
    assert "`text`" in str(caught.value) and "`prompt_completion`" in str(caught.value)
    with pytest.raises(ConfigError, match="known types: messages"):
        resolve_type("csv")


def test_messages_become_messages(tmp_path: Path) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "3", "reasoning_content": "hm"},
    ]
    (item,) = read(tmp_path, {"messages": rows, "tools": tools})
    assert item.messages == (
        Message("system", ""),
        Message("user", "ab"),
        Message("assistant", "", extra={"tool_calls": calls}),
        Message("tool", "3", extra={"tool_call_id": "1"}),
        Message("assistant", "3", extra={"reasoning_content": "hm"}),
    )
    assert item.tools == tuple(tools)
    assert read(tmp_path, {"messages": rows, "tools": json.dumps(tools)})[0].tools == tuple(tools)


@pytest.mark.parametrize(
    ("fields", "train"),
    [
        ({"content": "a"}, None),
        ({"content": "a", "weight": None}, None),
        ({"content": "a", "weight": 0}, False),
        ({"content": "a", "weight": 1}, True),
        ({"content": "a", "weight": 1.0}, True),
        ({"content": ""}, False),
        ({"content": "", "weight": 1}, True),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, None),
    ],
)
def test_weight_and_silence_decide_what_is_trained(tmp_path: Path, fields: dict[str, object], train: bool) -> None:
    assert turn(tmp_path, **fields).train is train


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"content": "a", "weight": 0.5}, "bad_weight"),
        ({"content": "a", "weight": True}, "bad_weight"),
        ({"content": "a", "weight": "1"}, "bad_weight"),
        ({"content": "a", "weight": []}, "bad_weight"),
        ({"content": "a", "role": "user", "weight": 1}, "bad_weight"),
        ({"content": None}, "wrong_type"),
        ({}, "missing_field"),
        ({"content": 5}, "wrong_type"),
        ({"content": [{"type": "image_url"}]}, "bad_content"),
        ({"content": ["a"]}, "wrong_type"),
        ({"content": "a", "role": "human"}, "unknown_role"),
        ({"content": "a", "role": "developer"}, "unknown_role"),
        ({"content": "a", "role": None}, "wrong_type"),
        ({"content": "a", "name": 5}, "wrong_type"),
        ({"content": "a", "tool_calls": "f"}, "wrong_type"),
        ({"content": "a", "tool_calls": ["f"]}, "wrong_type"),
        ({"content": "a", "tool_calls": [{"function": {"arguments": {}}}]}, "missing_field"),
        ({"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}, "wrong_type"),
        ({"content": "a", "role": "user", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "bad_tools"),
        ({"content": None, "function_call": {"name": "f"}}, "bad_tools"),
    ],
)
def test_bad_turns_are_refused(tmp_path: Path, fields: dict[str, object], code: str) -> None:
    assert refused_turn(tmp_path, **fields)[0] == code


def test_hints_for_neighbouring_formats(tmp_path: Path) -> None:
    assert "sharegpt" in refused_turn(tmp_path, role="human", content="a")[1]
    assert "write `system`" in refused_turn(tmp_path, role="developer", content="a")[1]
    assert "messages" in problem(tmp_path, {"conversations": [{"role": "user", "content": "a"}]})[2]
    assert "messages" in problem(tmp_path, {"prompt": [{"role": "user", "content": "a"}], "completion": "b"})[2]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"messages": []}, "empty_messages"),
        ({"messages": {}}, "wrong_type"),
        ({"messages": ["Hi"]}, "wrong_type"),
        ({**MESSAGES, "tools": {"name": "f"}}, "wrong_type"),
        ({**MESSAGES, "tools": ["f"]}, "wrong_type"),
        ({**MESSAGES, "tools": "[oops"}, "not_json"),
        ({**MESSAGES, "functions": []}, "bad_tools"),
        ({"conversations": []}, "empty_messages"),
        ({"conversations": [{"from": "bob", "value": "a"}]}, "unknown_role"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "wrong_type"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "not_json"),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, "bad_tools"),
        ({"conversations": [{"from": "function_call", "value": '{"name": "f"}'}]}, "wrong_type"),
        ({**ALPACA, "history": [["a"]]}, "wrong_type"),
        ({**ALPACA, "history": "a"}, "wrong_type"),
        ({**ALPACA, "input": 5}, "wrong_type"),
        ({**PAIR, "completion": 5}, "wrong_type"),
    ],
)
def test_bad_lines_of_each_shape(tmp_path: Path, row: dict[str, object], code: str) -> None:
    assert problem(tmp_path, row)[:2] == (1, code)


def test_sharegpt_becomes_messages(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "Yo", "weight": 0},
        ],
    }
    (item,) = read(tmp_path, row)
    assert item.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "", extra={"tool_calls": [{"type": "function", "function": call}]}),
        Message("tool", "3"),
        Message("assistant", "Yo", train=False),
    )


def test_alpaca_becomes_messages(tmp_path: Path) -> None:
    row = {"system": "Be brief.", "instruction": "Add", "input": "1 1", "output": "2", "history": [["Hi", "Yo"]]}
    (item,) = read(tmp_path, row)
    assert item.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yo"),
        Message("user", "Add\n1 1"),
        Message("assistant", "2"),
    )
    (plain,) = read(tmp_path, {**ALPACA, "input": "", "system": None})
    assert plain.messages == (Message("user", "Say hi"), Message("assistant", "hi"))


def test_pairs_and_texts_keep_their_strings(tmp_path: Path) -> None:
    for row in (PAIR, IN_OUT):
        (item,) = read(tmp_path, row)
        assert (item.prompt, item.completion, item.messages) == ("a", "b", ())
    (item,) = read(tmp_path, TEXT)
    assert (item.prompt, item.completion) == (None, "words")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (MESSAGES, True),
        ({"messages": [{"role": "user", "content": "Hi"}]}, False),
        ({"messages": [{"role": "assistant", "content": "Yo", "weight": 0}]}, False),
        ({**ALPACA, "output": ""}, False),
        ({**PAIR, "completion": ""}, False),
        ({"text": ""}, False),
        (PAIR, True),
    ],
)
def test_an_example_without_an_answer_teaches_nothing(tmp_path: Path, row: dict[str, object], expected: bool) -> None:
    assert teaches(read(tmp_path, row)[0]) is expected
