"""The preference example is what its generator writes, reads as pairs, and holds out what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from muxtune.data.reader import read_examples
from muxtune.spec.load import load_run

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = ("bare.jsonl", "bare.heldout.jsonl")


def test_the_files_are_what_the_generator_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "make_data", raising=False)
    spec = importlib.util.spec_from_file_location("make_pairs", EXAMPLES / "make_pairs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "pairs" / name).read_bytes()


def test_they_are_pairs_whose_prompts_do_not_meet() -> None:
    train, held_out = (read_examples(str(EXAMPLES / "pairs" / name)) for name in FILES)
    assert {pair.shape for pair in (*train, *held_out)} == {"preference"}
    asked = [{pair.messages[0].content for pair in part} for part in (train, held_out)]
    assert [len(prompts) for prompts in asked] == [64, 8] and asked[0].isdisjoint(asked[1])


def test_the_config_reads() -> None:
    run = load_run(str(EXAMPLES / "dpo.yaml")).run
    assert [(job.name, job.method, job.beta) for job in run.jobs] == [("bare", "dpo", 0.1), ("emoji", "sft", None)]
