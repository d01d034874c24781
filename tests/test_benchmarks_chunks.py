"""The benchmark of chunks: what it counts, and that what it times is what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.chunks import POLICIES, ineffective, overhead, padded_as_published
from benchmarks.loads import Load, light, non_uniform
from benchmarks.long import ROOT
from muxtune.data.types import TokenSequence
from tests.engine.build import backbone_of
from tests.tiny_tokenizer import VOCAB


def _load(*lengths: int) -> Load:
    """A task of each length, one example a step, two steps."""
    sequences = [
        TokenSequence(step, np.arange(length, dtype=np.int32) % VOCAB, np.arange(length) > length // 2)
        for length in lengths
        for step in range(2)
    ]
    return Load("mine", tuple(((sequences[2 * t],), (sequences[2 * t + 1],)) for t in range(len(lengths))))


def test_rows_that_are_no_token_are_counted_by_policy() -> None:
    backbone = backbone_of()
    packed, alone, padded = (ineffective(backbone, _load(60, 10, 30), policy) for policy in POLICIES)
    assert packed == pytest.approx(1 - 100 / 112)  # 100 rows, to a multiple of 16
    assert alone == pytest.approx(1 - 100 / (64 + 16 + 32))
    assert padded == pytest.approx(1 - 100 / 192)  # 3 x 60


def test_real_lengths_waste_over_half_where_they_are_padded_as_published() -> None:
    load = non_uniform(4, vocab=VOCAB)
    assert 0.3 < padded_as_published(load) < 0.9


def test_the_executors_own_share_is_a_share() -> None:
    assert 0 < overhead(backbone_of(), 3) < 1


def test_a_long_example_is_measured_whole_and_in_chunks(tiny_llama: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.long", "--model", str(tiny_llama), "--tokens", "100"]
    found = []
    for chunk in (100, 32):
        done = subprocess.run([*command, "--child", str(chunk)], cwd=ROOT, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    whole, cut = found
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5) and cut["step_s"] > 0
    assert whole["carried_bytes"] == 0
    assert cut["carried_bytes"] == 2 * 2 * 2 * 16 * 4 * (100 + 96)  # layers, a pair, heads, width, bytes, positions


def test_light_wastes_nothing() -> None:
    assert ineffective(backbone_of(), light(2, vocab=VOCAB), "fuse-all") == 0
