"""A job's data with the real tokenizer and template, from its spec to its sequences."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from muxtune.data.cache import TokenCache
from muxtune.data.check import check_file
from muxtune.data.dataset import Selection, build, job_renderer
from muxtune.data.prepare import PreparedJob
from muxtune.data.problems import DataFileError
from muxtune.data.render import Renderer
from muxtune.data.tokenizer import TextTokenizer
from muxtune.errors import ConfigError
from muxtune.spec import JobSpec
from tests.tiny_tokenizer import tiny_tokenizer

REAL = Path(__file__).parents[3] / "shared" / "data"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CHAT = {"messages": [{"role": "user", "content": "yes or no?"}, {"role": "assistant", "content": "no"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return TextTokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def renderer(tokenizer: TextTokenizer) -> Iterator[Renderer]:
    with Renderer(tokenizer, now=NOW) as made:
        yield made


def write(folder: Path, *rows: object, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained_text(tokenizer: TextTokenizer, renderer: Renderer, job: JobSpec, max_length: int = 256) -> list[str]:
    data = build(job, renderer, max_length=max_length)
    return [tokenizer.decode(sequence.ids[sequence.mask].tolist()) for sequence in data.train]


def test_every_shape_trains_its_answer_and_its_end(
    tmp_path: Path, tokenizer: TextTokenizer, renderer: Renderer
) -> None:
    rows = [
        CHAT,
        {"conversations": [{"from": "human", "value": "yes or no?"}, {"from": "gpt", "value": "no"}]},
        {"instruction": "yes or no?", "output": "no"},
        {"prompt": "yes or", "completion": " no"},
    ]
    paths = [write(tmp_path, row, name=f"{number}.jsonl") for number, row in enumerate(rows)]
    job = JobSpec(name="job", datasets=paths)
    assert trained_text(tokenizer, renderer, job) == ["no<|im_end|>"] * 3 + [" no<|im_end|>"]


def test_the_sequences_are_those_of_transformers(tmp_path: Path, renderer: Renderer) -> None:
    """`alpaca` and `sharegpt` rows too are what `apply_chat_template` makes of the messages they stand for."""
    rows = [{"instruction": "Answer", "input": "yes or no?", "output": "no", "system": "Be brief."}]
    data = build(JobSpec(name="job", datasets=[write(tmp_path, *rows)]), renderer, max_length=256)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Answer\nyes or no?"},
        {"role": "assistant", "content": "no"},
    ]
    expected = tiny_tokenizer().apply_chat_template(messages, return_dict=False)
    assert data.train[0].ids.tolist() == expected
    assert (data.system, data.shape) == ("Be brief.", "alpaca")


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({"messages": CHAT["messages"][:1]}, "no answer"),
        ({"messages": [CHAT["messages"][0], {"role": "assistant", "content": ""}]}, "an empty answer"),
        ({"messages": [CHAT["messages"][0], {"role": "assistant", "content": "no", "weight": 0}]}, "weight 0"),
        ({"messages": [{"role": "user", "content": "yes " * 300}, CHAT["messages"][1]]}, "an answer out of reach"),
    ],
)
def test_examples_without_a_target_are_dropped_with_a_warning(
    tmp_path: Path, renderer: Renderer, row: dict[str, object], lost: str
) -> None:
    path = write(tmp_path, CHAT, row, CHAT, row)
    data = build(JobSpec(name="job", datasets=[path]), renderer, max_length=64)
    assert len(data.train) == 2, lost
    assert data.report.warnings == (f"2 examples with nothing to train on, dropped: {path} lines 2, 4",)
    assert not check_file(write(tmp_path, row, row), renderer=renderer, selection=Selection(64)).ok


def test_an_empty_completion_teaches_nothing(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path, {"prompt": "yes", "completion": ""}, {"prompt": "yes", "completion": "no"})
    report = build(JobSpec(name="job", datasets=[path]), renderer, max_length=64).report
    assert (report.train_sequences, report.dropped_untrained.first) == (1, ((path, 1),))


def test_train_on_all_needs_no_answer(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    row = {"prompt": "yes or no", "completion": ""}
    job = JobSpec(name="job", datasets=[write(tmp_path, row)], train_on="all")
    with job_renderer(job, tokenizer, now=NOW) as renderer:
        (text,) = trained_text(tokenizer, renderer, job)
    assert text.endswith("or no<|im_end|>")


def test_a_long_text_loses_no_target_to_splitting(tmp_path: Path, renderer: Renderer) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 40
    job = JobSpec(name="job", datasets=[write(tmp_path, {"text": words})])
    whole = build(job, renderer, max_length=4096)
    split = build(job, renderer, max_length=50)
    assert len(whole.train) == 1 and len(split.train) > 5
    targets = [data.train for data in (whole, split)]
    one, many = (np.concatenate([sequence.ids[sequence.mask] for sequence in sequences]) for sequences in targets)
    assert np.array_equal(one, many)
    assert split.report.lengths.longest == 50 and split.report.split.count == 1


def test_what_the_template_refuses_is_named_by_line(tmp_path: Path, renderer: Renderer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = write(tmp_path, CHAT, {**CHAT, "tools": tools}, {"messages": []})
    with pytest.raises(DataFileError) as caught:
        build(JobSpec(name="job", datasets=[path]), renderer, max_length=64)
    assert [problem.line for problem in caught.value.problems] == [2, 3]
    assert not check_file(path, renderer=renderer, selection=Selection(64)).ok


def test_a_cached_build_equals_a_fresh_one(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n} or no?"}, CHAT["messages"][1]]} for n in range(30)]
    job = JobSpec(name="job", datasets=[write(tmp_path, *rows)], val_set_size=0.2, seed=3)
    cache = TokenCache(tmp_path / "cache")
    fresh, plain = build(job, renderer, max_length=64, cache=cache), build(job, renderer, max_length=64)
    cached = build(job, renderer, max_length=64, cache=cache)
    assert [data.report.files[0].cached for data in (fresh, plain, cached)] == [False, False, True]
    assert (len(plain.train), len(plain.validation)) == (24, 6)
    for other in (fresh, cached):
        for part in ("train", "validation"):
            for ours, theirs in zip(getattr(other, part), getattr(plain, part), strict=True):
                assert ours.index == theirs.index
                assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.mask, theirs.mask)


def test_another_train_on_or_template_is_another_entry(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    cache, path = TokenCache(tmp_path / "cache"), write(tmp_path, CHAT)
    for options in ({}, {"train_on": "all"}, {"chat_template": "plain"}, {"ignore_tools": True}):
        job = JobSpec(name="job", datasets=[path], **options)
        with job_renderer(job, tokenizer, now=NOW) as renderer:
            assert not build(job, renderer, max_length=64, cache=cache).report.files[0].cached, options
            assert build(job, renderer, max_length=64, cache=cache).report.files[0].cached, options


def test_no_example_text_reaches_the_logs(tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = {"messages": [{"role": "user", "content": "my-secret"}, {"role": "assistant", "content": "my-secret"}]}
    cache = TokenCache(tmp_path / "cache")
    build(JobSpec(name="job", datasets=[write(tmp_path, secret)]), renderer, max_length=64, cache=cache)
    bad = {"messages": [{"role": "user", "content": "my-secret"}, {"role": "my-secret", "content": "x"}]}
    with pytest.raises(DataFileError) as caught:
        build(JobSpec(name="job", datasets=[write(tmp_path, secret, bad)]), renderer, max_length=64, cache=cache)
    assert "my-secret" in str(caught.value)
    assert "my-secret" not in caplog.text


@pytest.mark.skipif(not REAL.is_dir(), reason="the folder of real data sets is not part of a checkout")
@pytest.mark.parametrize("folder", ["banking77", "gsm8k", "openbookqa", "rte", "sst2"])
def test_real_data_sets_become_sequences(folder: str, renderer: Renderer, tokenizer: TextTokenizer) -> None:
    path = REAL / folder / "test.jsonl"
    data = build(JobSpec(name="job", datasets=[str(path)]), renderer, max_length=4096)
    answers = [json.loads(line)["messages"][-1]["content"] for line in path.read_text().splitlines()]
    assert [tokenizer.decode(one.ids[one.mask].tolist()) for one in data.train] == [f"{a}<|im_end|>" for a in answers]
    assert data.report.warnings == () and data.report.train_sequences == 200


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"warmup_steps": 100},
            "warmup_steps 100 is not less than the 2 steps of the job: its learning rate only rises, ",
        ),
        ({"warmup_steps": 2}, "warmup_steps 2 is not less than the 2 steps of the job"),
        ({"warmup_steps": 1}, None),
        ({"warmup_steps": 0.5}, None),
        ({}, None),
    ],
)
def test_a_warmup_that_never_ends_is_told(
    tmp_path: Path, renderer: Renderer, keys: dict[str, float], told: str | None
) -> None:
    job = JobSpec(name="a", datasets=write(tmp_path, CHAT), max_steps=2, learning_rate=1e-3, **keys)
    prepared = PreparedJob(job, build(job, renderer, max_length=100), renderer, NOW)
    assert len(prepared.warnings) == (told is not None)
    assert not told or prepared.warnings[0].startswith(told)
    assert keys.get("warmup_steps") != 100 or prepared.warnings[0].endswith("to 1e-05 of 0.001")


def test_what_the_data_say_of_a_key_names_the_job(tmp_path: Path, renderer: Renderer) -> None:
    job = JobSpec(name="a", datasets=write(tmp_path, CHAT, CHAT), val_set_size=2)
    with pytest.raises(ConfigError, match="2 of 2 examples held out leaves none to train on") as caught:
        build(job, renderer, max_length=100)
    assert (caught.value.where, caught.value.hint) == ("jobs.a.val_set_size", "at most 1")
