"""Preference pairs: what a line may look like, what of it is trained, and that a pair is never parted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.cache import TokenCache
from muxtune.data.check import check_file
from muxtune.data.dataset import Selection, Source, TaskData, assemble
from muxtune.data.overlong import Overlong, keep
from muxtune.data.preview import preview
from muxtune.data.problems import DataFileError
from muxtune.data.shapes import teaches
from muxtune.data.tokens import TableBuilder
from muxtune.data.types import Example
from muxtune.errors import DataError
from tests.data.rendering import CALL, TOOLS, Open, render, trained
from tests.data.test_dataset import ByteRenderer, texts
from tests.data.test_shapes import MESSAGES, PAIR, problem, read

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("assistant", "B"))
)
OPENAI = {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
TURNS = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
TEXTS = {"prompt": "Q", "chosen": "A", "rejected": "B"}


def said(example: Example | None) -> list[tuple[str, str, bool | None]]:
    assert example is not None
    return [(message.role, message.content, message.train) for message in example.messages]


@pytest.mark.parametrize(
    "row",
    [
        OPENAI,
        {"input": {"messages": [USER]}, "preferred_completion": [GOOD], "non_preferred_completion": [BAD]},
        TURNS,
        {"messages": [USER], "chosen": [GOOD], "rejected": "B"},
        {"prompt": "Q", "chosen": "A", "rejected": [BAD]},
        {"prompt": [USER], "chosen": "A", "rejected": "B"},
        {**TURNS, "messages": [USER, GOOD], "score_chosen": 8.5},
    ],
)
def test_every_way_to_write_a_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    for declared in (None, "preference"):
        (pair,) = read(tmp_path, row, declared=declared)  # type: ignore[arg-type]
        assert pair.shape == "preference" and teaches(pair)
        assert said(pair) == [("user", "Q", False), ("assistant", "A", True)]
        assert said(pair.rejected) == [("user", "Q", False), ("assistant", "B", True)]


def test_bare_texts(tmp_path: Path) -> None:
    (pair,) = read(tmp_path, TEXTS)
    assert pair.rejected is not None and not pair.messages
    assert [(half.prompt, half.completion) for half in pair.group] == [("Q", "A"), ("Q", "B")]


def test_no_turn_of_the_prompt_is_trained_whatever_its_weight(tmp_path: Path) -> None:
    before = [USER, {**GOOD, "weight": 1}, USER]
    (pair,) = read(tmp_path, {"prompt": before, "chosen": [{**GOOD, "weight": 0}], "rejected": [BAD]})
    assert [train for _, _, train in said(pair)] == [False, False, False, True]
    called = {"role": "assistant", "tool_calls": [CALL]}
    answer = [called, {"role": "tool", "content": "sunny"}, GOOD]
    (pair,) = read(tmp_path, {"prompt": [USER], "chosen": answer, "rejected": [BAD], "tools": list(TOOLS)})
    assert [train for _, _, train in said(pair)] == [False, True, False, True]
    assert pair.tools == pair.rejected.tools == TOOLS if pair.rejected else False


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ({"prompt": "Q", "chosen": "A"}, "unknown_shape", "not all are there"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, "unknown_shape", "not all are there"),
        ({**TURNS, "chosen": []}, "empty_messages", "field `chosen` is empty"),
        ({**TURNS, "chosen": 5}, "wrong_type", "field `chosen`: expected string or array of turns, got number"),
        ({**TURNS, "prompt": {"a": 1}}, "wrong_type", "field `prompt`: expected string or array of turns, got object"),
        ({**TURNS, "chosen": [USER, GOOD]}, "bad_response", "`chosen[0]` is the user's turn"),
        ({**TURNS, "rejected": [BAD, USER]}, "bad_response", "`rejected[1]` is the user's turn"),
        ({**TURNS, "rejected": [{"role": "bot", "content": "x"}]}, "unknown_role", "`rejected[0].role` is `bot`"),
        ({**OPENAI, "preferred_output": [GOOD, GOOD]}, "bad_response", "`preferred_output` has 2 turns"),
        ({**OPENAI, "input": [USER]}, "wrong_type", "field `input`: expected object"),
        ({**OPENAI, "input": {}}, "missing_field", "field `input.messages` is missing"),
        ({**OPENAI, "input": {"messages": [{"role": "user"}]}}, "missing_field", "`input.messages[0].content`"),
        ({**TEXTS, "tools": list(TOOLS)}, "bad_tools", "`tools` belong to a conversation"),
        ({**TEXTS, "completion": "C"}, "ambiguous_shape", "prompt_completion"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: dict[str, Any], code: str, message: str) -> None:
    line, found, text = problem(tmp_path, row)
    assert (line, found) == (1, code) and message in text


def test_a_file_has_one_layout(tmp_path: Path) -> None:
    for rows, message in (((TEXTS, TURNS), "is a conversation"), ((TURNS, TEXTS), "is bare text")):
        line, code, text = problem(tmp_path, *rows)
        assert (line, code) == (2, "other_shape") and message in text
    for first in (OPENAI, TURNS, MESSAGES, PAIR):
        for other in (OPENAI, TURNS, MESSAGES, PAIR):
            if other is not first:
                assert problem(tmp_path, first, other)[:2] == (2, "other_shape")


def test_each_response_is_trained_with_its_end_of_turn_and_the_prompt_never(
    open_renderer: Open, tmp_path: Path
) -> None:
    before = [{"role": "system", "content": "S"}, USER, GOOD, USER]
    (pair,) = read(tmp_path, {"prompt": before, "chosen": [GOOD], "rejected": [BAD]})
    renderer = open_renderer()
    assert [trained(renderer, half) for half in pair.group] == [["A<|im_end|>"], ["B<|im_end|>"]]
    ids = [render(renderer, half).ids.tolist() for half in pair.group]
    assert ids[0][:-3] == ids[1][:-3], "one prompt"
    (bare,) = read(tmp_path, TEXTS)
    assert [trained(renderer, half) for half in bare.group] == [["A<|im_end|>"], ["B<|im_end|>"]]
    shown = preview(renderer, [pair])
    assert [item.heading().split(": ")[0] for item in shown] == [f"{pair.path}:1 chosen", f"{pair.path}:1 rejected"]


def write(folder: Path, rows: list[tuple[str, str, str]]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(dict(zip(TEXTS, row, strict=True))) + "\n" for row in rows))
    return str(path)


def collect(path: str, *, cache: TokenCache | None = None, **selection: Any) -> TaskData:
    return assemble(
        [Source(path, weight=selection.pop("weight", 1.0))],
        None,
        ByteRenderer(),
        Selection(selection.pop("max_length", 100), pairs=True, **selection),
        cache=cache,
    )


def test_a_pair_is_two_sequences_in_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, [("p", "aa", "b"), ("q", "c", "dd")])
    cache = TokenCache(tmp_path / "cache")
    for cached in (False, True):
        data = collect(path, cache=cache)
        assert texts(data.train) == ["paa", "pb", "qc", "qdd"] and data.groups == 2
        assert [sequence.index for sequence in data.train] == [0, 1, 2, 3]
        file = data.report.files[0]
        assert (file.shape, file.examples, file.cached) == ("preference", 2, cached)
        assert (data.shape, data.prompt_shape) == ("preference", "prompt_completion")


@pytest.mark.parametrize(
    ("policy", "left", "dropped"),
    [
        ("truncate", ["paaa", "pb", "rrre", "rrrf"], 1),  # of the second pair a response is cut off
        ("drop", ["rrre", "rrrf"], 2),
    ],
)
def test_what_is_too_long_takes_its_other_half_with_it(
    tmp_path: Path, policy: str, left: list[str], dropped: int
) -> None:
    path = write(tmp_path, [("p", "aaaaa", "b"), ("qqqqqq", "c", "d"), ("rrr", "e", "f")])
    data = collect(path, max_length=5, overlong=policy)
    cut = [text if len(text) < 5 else text[:5] for text in left]
    assert [text[:4] for text in texts(data.train)] == [text[:4] for text in cut]
    report = data.report
    assert report.dropped_untrained.count + report.dropped_overlong.count == dropped
    with pytest.raises(DataFileError, match="2 bad lines"):
        collect(path, max_length=5, overlong="fail")
    with pytest.raises(DataError, match="cannot be split"):
        collect(path, max_length=5, overlong="split")


def test_an_empty_response_drops_the_pair(tmp_path: Path) -> None:
    path = write(tmp_path, [("p", "a", ""), ("q", "c", "d")])
    assert texts(collect(path).train) == ["qc", "qd"]
    assert check_file(path).unanswered.count == 1
    with pytest.raises(DataError, match="no example is left"):
        collect(write(tmp_path, [("p", "a", "")]))


def test_a_half_that_cannot_be_rendered_refuses_the_pair_once(tmp_path: Path) -> None:
    with pytest.raises(DataFileError) as caught:
        collect(write(tmp_path, [("p", "refuse", "refuse"), ("q", "c", "refuse")]))
    assert [item.line for item in caught.value.problems] == [1, 2] and caught.value.total == 2


def test_held_out_and_weighed_pairs_stay_whole(tmp_path: Path) -> None:
    path = write(tmp_path, [(f"p{number}", "a", "b") for number in range(10)])
    data = collect(path, val_set_size=0.3, weight=1.5)
    for part, pairs in ((data.train, 10 if len(data.train) == 20 else 11), (data.validation, 3)):
        assert len(part) == 2 * pairs
        for chosen, rejected in zip(texts(part)[::2], texts(part)[1::2], strict=True):
            assert (chosen[:2], chosen[2:], rejected[2:]) == (rejected[:2], "a", "b")


def test_data_and_method_must_agree(tmp_path: Path) -> None:
    pairs = write(tmp_path, [("p", "a", "b")])
    with pytest.raises(DataError, match=r"are preference pairs, the method is sft \(method: dpo\)"):
        assemble([Source(pairs)], None, ByteRenderer(), Selection(100, pairs=False))
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps(PAIR) + "\n")
    for sources, held_out in (([Source(str(plain))], None), ([Source(pairs)], Source(str(plain)))):
        with pytest.raises(DataError, match="not preference pairs but prompt_completion, the method is dpo"):
            assemble(sources, held_out, ByteRenderer(), Selection(100, pairs=True))


@given(
    lengths=st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=1, max_size=8),
    policy=st.sampled_from(["truncate", "drop"]),
    first=st.integers(1, 11),
)
def test_no_policy_keeps_half_a_pair(lengths: list[tuple[int, int]], policy: Overlong, first: int) -> None:
    """Ids say which pair and half a sequence is; targets begin at place `first`."""
    builder = TableBuilder()
    for pair, halves in enumerate(lengths):
        for half, length in enumerate(halves):
            ids = np.full(length, 10 * pair + half, np.int32)
            builder.add(ids, np.arange(length) >= first, line=pair + 1)
    table = builder.build()
    wanted = [
        pair
        for pair, halves in enumerate(lengths)
        if min(halves) > first and first < 8 and (policy == "truncate" or max(halves) <= 8)
    ]
    try:
        kept = keep(table, "f", 8, policy, group=2)
    except DataError:
        assert not wanted
        return
    assert [[int(ids[0]) for ids, _ in pieces] for pieces in kept.examples] == [
        [10 * pair, 10 * pair + 1] for pair in wanted
    ]
    assert all(mask.any() and len(ids) <= 8 for pieces in kept.examples for ids, mask in pieces)


def test_a_pair_that_compares_nothing_is_told_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, [("p", "a", "b"), ("q", "c", "c"), ("r", "x" * 9, "x" * 8), ("s", "", "d")])
    report = collect(path, max_length=8).report  # the third pair is one after both halves are cut
    assert (report.same_responses.count, report.same_responses.first) == (2, ((path, 2), (path, 3)))
    told = f"chosen and rejected responses are equal, which teaches nothing: {path} lines 2, 3"
    assert any(told in warning for warning in report.warnings) and report.to_json()["same_responses"] == 2
    assert collect(path, max_length=8).groups == 3


@pytest.mark.parametrize("bad", [(), ("oops\n",)])
@pytest.mark.parametrize("tokenized", [False, True])
def test_check_names_them_beside_bad_lines_too(tmp_path: Path, bad: tuple[str, ...], tokenized: bool) -> None:
    path = write(tmp_path, [("p", "a", "b"), ("q", "c", "c"), ("s", "", "d")])
    Path(path).write_text(Path(path).read_text() + "".join(bad))
    more: dict[str, Any] = {"renderer": ByteRenderer(), "selection": Selection(100)} if tokenized else {}
    report = check_file(path, **more)
    told = "\n".join(report.lines())
    assert report.ok == (not bad) and ("not_json" in told) == bool(bad)
    assert f"are equal, which teaches nothing: {path} line 2" in told
    assert f"{path} line 3" in told, "the empty one"
