"""From files to numbered sequences: splits, weights, policies, reports and the cache, with a renderer of bytes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxtune.data.cache import TokenCache
from muxtune.data.dataset import Selection, Source, TaskData, assemble
from muxtune.data.problems import DataFileError
from muxtune.data.render import Rejected, Rendered
from muxtune.data.types import Example
from muxtune.errors import ConfigError, DataError, StateError


class ByteRenderer:
    """Ids are the bytes of prompt + completion + 0; the completion and the 0 are targets. Counts what it renders."""

    def __init__(self, fingerprint: str = "bytes") -> None:
        self.fingerprint = fingerprint
        self.train_on = "assistant"
        self.rendered = 0

    def render(self, examples: Sequence[Example]) -> list[Rendered | Rejected]:
        self.rendered += len(examples)
        return [self._one(example) for example in examples]

    def _one(self, example: Example) -> Rendered | Rejected:
        if example.messages:
            prompt, answer = example.messages[-2].content, example.messages[-1].content
        else:
            prompt, answer = example.prompt or "", example.completion or ""
        if "refuse" in answer:
            return Rejected("template", "the template cannot render this")
        ids = np.array([*prompt.encode(), *answer.encode(), 0], dtype=np.int32)
        mask = np.arange(len(ids)) >= max(1, len(prompt.encode()))
        return Rendered(ids, mask)


def write(folder: Path, rows: Sequence[tuple[str, str]], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    return str(path)


def collect(
    *sources: str | Source,
    held_out: str | None = None,
    renderer: ByteRenderer | None = None,
    cache: TokenCache | None = None,
    max_length: int = 100,
    **selection: Any,
) -> TaskData:
    return assemble(
        [source if isinstance(source, Source) else Source(source) for source in sources],
        Source(held_out) if held_out else None,
        renderer or ByteRenderer(),
        Selection(max_length, **selection),
        cache=cache,
    )


def texts(sequences: Sequence[Any]) -> list[str]:
    return [bytes(sequence.ids.tolist()).rstrip(b"\0").decode() for sequence in sequences]


def numbered(folder: Path, count: int, name: str = "data.jsonl", letter: str = "x") -> str:
    return write(folder, [(f"{letter}{number:03}", "y") for number in range(count)], name)


def test_sequences_come_in_order_and_are_numbered(tmp_path: Path) -> None:
    data = collect(numbered(tmp_path, 2, "a.jsonl", "a"), numbered(tmp_path, 2, "b.jsonl", "b"))
    assert texts(data.train) == ["a000y", "a001y", "b000y", "b001y"]
    assert [sequence.index for sequence in data.train] == [0, 1, 2, 3]
    assert [sequence.trained_tokens for sequence in data.train] == [2] * 4
    report = data.report
    assert (report.train_sequences, report.train_tokens, report.trained_tokens) == (4, 24, 8)
    assert report.lengths.counts == ((6, 4),)
    assert [(file.examples, file.shape) for file in report.files] == [(2, "prompt_completion")] * 2


def test_no_sequence_can_be_written_to(tmp_path: Path) -> None:
    data = collect(write(tmp_path, [("a", "b" * 30)]), overlong="split", max_length=8)
    for sequence in data.train:
        assert sequence.ids.dtype == np.int32 and sequence.mask.dtype == np.bool_
        assert not sequence.ids.flags.writeable and not sequence.mask.flags.writeable


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(2, 30), size=st.one_of(st.integers(1, 29), st.floats(0.01, 0.9)), seed=st.integers(0, 99))
def test_the_held_out_split_parts_the_examples(tmp_path: Path, count: int, size: float, seed: int) -> None:
    path = numbered(tmp_path, count)
    wanted = size if isinstance(size, int) else int(np.ceil(size * count))
    if wanted >= count:
        with pytest.raises(ConfigError, match="leaves none"):
            collect(path, val_set_size=size, seed=seed)
        return
    data = collect(path, val_set_size=size, seed=seed)
    train, validation = texts(data.train), texts(data.validation)
    assert len(validation) == wanted
    assert sorted(train + validation) == [f"x{number:03}y" for number in range(count)]
    assert train == sorted(train) and validation == sorted(validation)
    assert texts(collect(path, val_set_size=size, seed=seed).validation) == validation


def test_the_split_depends_on_the_seed(tmp_path: Path) -> None:
    path = numbered(tmp_path, 40)
    assert len({tuple(texts(collect(path, val_set_size=10, seed=seed).validation)) for seed in range(8)}) == 8


def test_pieces_of_a_held_out_example_are_held_out_together(tmp_path: Path) -> None:
    path = write(tmp_path, [("", letter * 50) for letter in "abcdefgh"])
    data = collect(path, overlong="split", max_length=10, val_set_size=0.5)
    train, validation = ({text[0] for text in texts(part)} for part in (data.train, data.validation))
    assert len(train) == len(validation) == 4 and not train & validation


def test_a_validation_file_is_read_beside(tmp_path: Path) -> None:
    data = collect(numbered(tmp_path, 3), held_out=numbered(tmp_path, 2, "val.jsonl", "v"))
    assert (texts(data.validation), len(data.train)) == (["v000y", "v001y"], 3)
    assert [sequence.index for sequence in data.validation] == [0, 1]
    assert data.report.validation_sequences == 2


@pytest.mark.parametrize(
    ("weight", "copies"), [(1.0, {1: 10}), (2.0, {2: 10}), (0.5, {1: 5}), (2.3, {2: 7, 3: 3}), (0.25, {1: 2})]
)
def test_weight_is_how_often_an_example_is_there(tmp_path: Path, weight: float, copies: dict[int, int]) -> None:
    path, other = numbered(tmp_path, 10), numbered(tmp_path, 3, "b.jsonl", "b")
    data = collect(Source(path, weight=weight), other)
    counts = Counter(text for text in texts(data.train) if text.startswith("x"))
    assert Counter(counts.values()) == copies
    assert len([text for text in texts(data.train) if text.startswith("b")]) == 3
    assert [sequence.index for sequence in data.train] == list(range(len(data.train)))
    again = collect(Source(path, weight=weight), other)
    assert texts(again.train) == texts(data.train)


def test_copies_of_a_training_example_are_never_held_out(tmp_path: Path) -> None:
    data = collect(Source(numbered(tmp_path, 10), weight=3), val_set_size=0.3)
    assert len(data.validation) == 3 and len(data.train) == 21
    assert not set(texts(data.train)) & set(texts(data.validation))


def test_a_weight_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path, 3)
    for size, hint in ((0, "raise weight"), (1, "raise weight, or hold out fewer with val_set_size")):
        with pytest.raises(DataError, match="no example is left") as caught:
            collect(Source(path, weight=0.01), val_set_size=size)
        assert "weight 0.01 rounds to none" in caught.value.message and caught.value.hint == hint


@pytest.mark.parametrize("weight", [1e9, 1e300, 2**22 / 3 + 2])
def test_weights_that_would_fill_the_memory_are_refused_before_a_copy_is_made(tmp_path: Path, weight: float) -> None:
    path = numbered(tmp_path, 3)
    with pytest.raises(
        ConfigError, match=r"copies of the 3 examples of .*; the weights .* may add 4,194,304"
    ) as caught:
        collect(path, Source(path, weight=weight))
    assert caught.value.where == "datasets.1.weight" and "lower the weight" in (caught.value.hint or "")


def test_all_copies_of_a_job_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = numbered(tmp_path, 4)
    monkeypatch.setattr("muxtune.data.dataset.MAX_COPIES", 12)
    data = collect(Source(path, weight=0.5), Source(path, weight=2), Source(path, weight=3))
    assert len(data.train) == 2 + 8 + 12
    with pytest.raises(ConfigError, match="12 copies") as caught:
        collect(Source(path, weight=2.5), Source(path, weight=4))
    assert caught.value.where == "datasets.1.weight"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0.001, "val_set_size 0.001 holds out 1 example of 10 and leaves 9"),
        (1, "val_set_size 1 holds out 1 example of 10 and leaves 9"),
        (9, "val_set_size 9 holds out 9 examples of 10 and leaves 1"),
        (0.2, None),
    ],
)
def test_a_split_that_may_not_be_meant_is_told(tmp_path: Path, size: float, told: str | None) -> None:
    report = collect(Source(numbered(tmp_path, 10), weight=2), val_set_size=size).report
    assert report.warnings == ((told,) if told else ())
    assert any(line.startswith("validation:") and "holds out" in line for line in report.lines())


def test_what_happened_to_lines_is_counted_and_named(tmp_path: Path) -> None:
    rows = [("a", "b"), ("a", ""), ("a" * 30, "b"), ("a", "b" * 30), ("a", "")]
    report = collect(write(tmp_path, rows), max_length=10).report
    path = str(tmp_path / "data.jsonl")
    assert (report.dropped_untrained.count, report.dropped_untrained.first) == (3, ((path, 2), (path, 3), (path, 5)))
    assert (report.truncated.count, report.truncated.first) == (1, ((path, 4),))
    assert report.warnings == (
        f"1 example longer than 10 tokens, truncated: {path} line 4",
        f"3 examples with nothing to train on, dropped: {path} lines 2, 3, 5",
    )
    assert report.to_json()["dropped_untrained"] == 3
    assert json.loads(json.dumps(report.to_json()))["warnings"] == list(report.warnings)
    assert report.lines()[-2:] == [f"warning: {warning}" for warning in report.warnings]


def test_many_lines_are_counted_and_ten_named(tmp_path: Path) -> None:
    report = collect(write(tmp_path, [("a", "b"), *[("a", "")] * 25])).report
    assert report.warnings[0].endswith("lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 15 more")


def test_a_file_of_only_untrainable_examples_fails(tmp_path: Path) -> None:
    good = numbered(tmp_path, 3)
    bad = write(tmp_path, [("a", ""), ("b", "")], "bad.jsonl")
    for arguments in ((bad,), (good, bad)):
        with pytest.raises(DataError, match=r"bad\.jsonl: no example is left to train on: 2 have nothing"):
            collect(*arguments)
    with pytest.raises(DataError, match=r"bad\.jsonl: no example"):
        collect(good, held_out=bad)


def test_text_is_split_and_the_rest_truncated_by_default(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "t" * 20}) + "\n")
    data = collect(write(tmp_path, [("a", "b" * 20)]), str(text), max_length=10)
    assert texts(data.train) == ["a" + "b" * 9, "t" * 10, "t" * 10, "tt"]
    assert (data.report.truncated.count, data.report.split.count) == (1, 1)
    assert len(data.report.warnings) == 1 and "truncated" in data.report.warnings[0]


def test_refusals_of_reader_and_renderer_come_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [("a", "b"), ("a", "refuse me"), ("a", "c")]
    path.write_text("oops\n" + "".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows) + "[]\n")
    with pytest.raises(DataFileError) as caught:
        collect(str(path))
    assert [(problem.line, problem.code) for problem in caught.value.problems] == [
        (1, "not_json"),
        (3, "template"),
        (5, "json_array"),
    ]
    assert "refuse me" in str(caught.value) and "refuse me" not in caught.value.message


def test_bad_and_empty_files_raise_what_the_reader_says(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"foo": 1}\n{"bar": 1}\n')
    with pytest.raises(DataFileError) as caught:
        collect(str(tmp_path / "bad.jsonl"))
    assert caught.value.counts == {"unknown_shape": 2}
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="the file is empty"):
        collect(str(tmp_path / "empty.jsonl"))


def test_a_second_time_nothing_is_rendered_and_all_is_equal(tmp_path: Path) -> None:
    cache, renderer = TokenCache(tmp_path / "cache"), ByteRenderer()
    path = write(tmp_path, [("a", "b"), ("a", ""), ("a", "b" * 30)])
    fresh = collect(path, renderer=renderer, cache=cache, max_length=10)
    assert renderer.rendered == 3
    for max_length in (10, 20):  # a cached table is cut anew
        plain = collect(path, max_length=max_length)
        cached = collect(path, renderer=renderer, cache=cache, max_length=max_length)
        assert renderer.rendered == 3 and cached.report.files[0].cached
        for ours, theirs in zip(cached.train, plain.train, strict=True):
            assert ours.index == theirs.index
            assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.mask, theirs.mask)
        assert cached.report.warnings == plain.report.warnings
        assert (cached.shape, cached.system) == (plain.shape, plain.system)
    assert not fresh.report.files[0].cached


def test_other_bytes_or_another_renderer_are_rendered_anew(tmp_path: Path) -> None:
    cache, renderer = TokenCache(tmp_path / "cache"), ByteRenderer()
    collect(write(tmp_path, [("a", "b")]), renderer=renderer, cache=cache)
    changed = collect(write(tmp_path, [("a", "c")]), renderer=renderer, cache=cache)
    assert (renderer.rendered, texts(changed.train)) == (2, ["ac"])
    other = ByteRenderer("another template")
    collect(write(tmp_path, [("a", "c")]), renderer=other, cache=cache)
    assert other.rendered == 1


def test_bad_files_leave_nothing_in_the_cache(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "cache")
    with pytest.raises(DataFileError):
        collect(write(tmp_path, [("a", "b"), ("a", "refuse")]), cache=cache)
    assert not cache.folder.exists()


@pytest.mark.parametrize(
    ("systems", "shared"),
    [(["Be brief."] * 3, "Be brief."), (["Be brief.", "Be brief.", "Be long."], None), (["a", None, "a"], None)],
)
@pytest.mark.parametrize("twice", [False, True])
def test_the_shared_system_message_is_known(
    tmp_path: Path, systems: list[str | None], shared: str | None, twice: bool
) -> None:
    path, cache = tmp_path / "chat.jsonl", TokenCache(tmp_path / "cache")
    rows = []
    for system in systems:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rows.append({"messages": [{"role": "system", "content": system}, *turns] if system else turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(1 + twice):
        data = collect(str(path), cache=cache)
    assert (data.system, data.shape) == (shared, "messages")


def test_reading_can_be_cancelled(tmp_path: Path) -> None:
    path = numbered(tmp_path, 600)
    renderer, asked = ByteRenderer(), iter([False, True])
    with pytest.raises(StateError, match="cancelled"):
        assemble([Source(path)], None, renderer, Selection(10), cancelled=lambda: next(asked))
    assert 0 < renderer.rendered < 600


def test_nothing_of_an_example_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rows = [("my-secret", "b"), ("my-secret", ""), ("a", "my-secret" * 20)]
    collect(write(tmp_path, rows), cache=TokenCache(tmp_path / "cache"), max_length=20)
    with pytest.raises(DataFileError) as caught:
        collect(write(tmp_path, [*rows, ("my-secret", "refuse")]), cache=TokenCache(tmp_path / "cache"))
    assert "my-secret" not in caplog.text and "my-secret" not in caught.value.message
