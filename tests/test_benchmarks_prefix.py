"""The benchmark of shared prefixes: what it runs is what it says, and both sides train the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks import prefix
from benchmarks.prefix import APART, EXAMPLES, SHARED, made, prefix_costs
from benchmarks.report import Findings, show_prefix
from tests.engine.build import backbone_of
from tests.tiny_tokenizer import VOCAB


@pytest.mark.parametrize("kind", EXAMPLES)
def test_both_sides_train_the_same_on_fewer_rows(kind: str) -> None:
    costs = prefix_costs(backbone_of(), kind, 2)
    assert costs.agrees and all(len(seconds) == 2 for seconds in costs.seconds.values())
    saved = costs.rows[APART] - costs.rows[SHARED]
    expected = {"chat": 7 * 200, "pairs": 2 * 4 * 200, "apart": 0}[kind]
    assert saved == pytest.approx(expected, abs=16 * 4), "padding apart"
    assert costs.tokens == pytest.approx(8 * 230, rel=0.05)
    console = Console(record=True, width=120)
    show_prefix(console, costs)
    show_prefix(console, other := replace(costs, losses={SHARED: 1.0, APART: 1.1}))
    assert (text := console.export_text()).count("losses agree") == 1 and "losses DISAGREE" in text
    assert f"{costs.times:.2f}x" in text
    assert not Findings(prefixes=[other]).agree and Findings(prefixes=[costs]).agree


def test_examples_begin_alike_as_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "HEAD", 20)
    chat, pairs, apart = (np.stack([one.ids[:20] for one in made(kind, 3, VOCAB)]) for kind in EXAMPLES)
    assert len(np.unique(chat, axis=0)) == 1 and len(chat) == 3
    assert len(pairs) == 6 and len(np.unique(pairs, axis=0)) == 3 and np.array_equal(pairs[::2], pairs[1::2])
    assert len(np.unique(apart, axis=0)) == 3
    assert {one.trained_tokens for one in made("chat", 3, VOCAB)} == {prefix.TRAINED}
    assert all(one.trained_tokens == len(one) - 20 for one in made("pairs", 3, VOCAB))
