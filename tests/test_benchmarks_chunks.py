"""The benchmark of chunks: what it counts, and that what it times is what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.chunks import POLICIES, chunk_costs, overhead, padded_as_published, wasted
from benchmarks.loads import NON_UNIFORM, Load, light, non_uniform
from benchmarks.long import long_costs
from benchmarks.report import Findings, show_chunks, show_long
from muxtune.data.types import TokenSequence
from tests.engine.build import backbone_of
from tests.tiny_tokenizer import VOCAB


def _load(*lengths: int) -> Load:
    """A task of each length, one example of so many inputs a step, two steps."""
    sequences = [
        TokenSequence(step, np.arange(length + 1, dtype=np.int32) % VOCAB, np.arange(length + 1) > length // 2)
        for length in lengths
        for step in range(2)
    ]
    return Load("mine", tuple(((sequences[2 * t],), (sequences[2 * t + 1],)) for t in range(len(lengths))))


def test_rows_that_are_no_token_are_counted_by_policy() -> None:
    backbone = backbone_of()
    packed, alone, padded = (wasted(backbone, _load(60, 10, 30), policy) for policy in POLICIES)
    assert packed == pytest.approx(1 - 100 / 112)  # 100 rows, to a multiple of 16
    assert alone == pytest.approx(1 - 100 / (64 + 16 + 32))
    assert padded == pytest.approx(1 - 100 / 192)  # 3 x 60


def test_real_lengths_waste_over_half_where_they_are_padded_as_published() -> None:
    load = non_uniform(4, vocab=VOCAB)
    assert 0.3 < padded_as_published(load) < 0.9


def test_the_executors_own_share_is_a_share() -> None:
    assert 0 < overhead(backbone_of(), 3) < 1


def test_the_costs_of_each_policy_are_over_the_packed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    load = non_uniform(3, vocab=VOCAB)
    load = replace(load, tasks=load.tasks[:6])  # RTE is longer than the tiny model's positions
    monkeypatch.setattr("benchmarks.chunks.NON_UNIFORM", NON_UNIFORM[:6])
    costs = chunk_costs(backbone_of(), 2, load)
    assert [one.policy for one in costs.policies] == list(POLICIES)
    assert costs.policies[0].times_packed == 1.0 and all(len(one.seconds) == 2 for one in costs.policies)
    console = Console(record=True, width=120)
    show_chunks(console, costs)
    text = console.export_text()
    assert "fuse-all" in text and "executor's own share" in text and f"{costs.overhead:.1%}" in text


def test_a_long_example_is_measured_whole_and_in_chunks(tiny_llama: Path) -> None:
    costs = long_costs(tiny_llama, tokens=100, chunk=32)
    whole, cut, kept = costs.sides
    assert kept.kept and kept.loss == cut.loss and "activations kept" in kept.name
    assert costs.agrees and cut.loss == pytest.approx(whole.loss, rel=1e-5) and cut.step_s > 0
    assert whole.carried_bytes == 0 and costs.chunk_alone.tokens == 32
    assert cut.carried_bytes == 2 * 2 * 2 * 16 * 4 * (100 + 96)  # layers, a pair, heads, width, bytes, positions
    other = replace(costs, sides=(whole, replace(cut, loss=cut.loss * 1.001)))
    assert not other.agrees and not Findings(long=other).agree and Findings(long=costs).agree
    console = Console(record=True, width=120)
    show_long(console, other)
    assert "in chunks of 32" in (text := console.export_text()) and "DISAGREE" in text


def test_a_side_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        long_costs(tmp_path / "nothing", tokens=100, chunk=32)


def test_light_wastes_nothing() -> None:
    assert wasted(backbone_of(), light(2, vocab=VOCAB, tokens=17), "fuse-all") == 0
