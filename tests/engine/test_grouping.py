"""Whole tasks, grouped and one by one: the same bits, whoever comes, goes and sits where."""

from __future__ import annotations

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.peft.grouped import Rule, always, never
from muxtune.peft.lora import LoraModule
from tests.engine.build import Trained, Trial, assert_same_bits, attach, backbone_of, outcome, run, train

# Rows in pairs of equal number, of two ranks; one of them drops out.
TRIALS = (
    Trial("a", [12, 12, 12], batch=1, r=4, seed=1),
    Trial("b", [12, 12, 12], batch=1, r=4, seed=2, weight_decay=0.1),
    Trial("c", [12, 7, 12], batch=1, r=4, seed=3),
    Trial("d", [9, 20], batch=2, r=8, seed=4),
    Trial("e", [20, 9], batch=2, r=8, seed=5, max_grad_norm=0.05),
    Trial("f", [12, 12], batch=1, r=4, dropout=0.2, seed=6),
)


def _train(rule: Rule, dtype: torch.dtype) -> dict[str, Trained]:
    return train(backbone_of("llama", dtype), TRIALS, grouping=rule)


def test_grouped_one_by_one_and_alone_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    run_of = LoraModule.run
    monkeypatch.setattr(LoraModule, "run", lambda self, count, step: joined.append(count) or run_of(self, count, step))
    for dtype in (torch.float32, torch.float64):
        grouped = _train(always, dtype)
        assert {2, 3} <= set(joined), "nothing was grouped"
        joined.clear()
        one_by_one = _train(never, dtype)
        assert not joined
        for trial in TRIALS:
            assert_same_bits(grouped[trial.name], one_by_one[trial.name])
            alone = train(backbone_of("llama", dtype), [trial], grouping=always)
            assert_same_bits(grouped[trial.name], alone[trial.name])


def test_a_task_that_comes_when_another_has_gone_trains_as_ever() -> None:
    backbone = backbone_of("llama")
    engine = Engine(backbone, grouping=always)
    first, second, third = (attach(engine, trial) for trial in TRIALS[:3])
    engine.execute(engine.schedule([task.participant() for task in (first, second, third)]))
    engine.detach(second)
    del second
    late = attach(engine, TRIALS[1])
    steps = run(engine)
    expected = train(backbone, [TRIALS[1]])["b"]
    assert_same_bits(outcome(late, steps["b"]), expected)
    assert torch.equal(outcome(third, steps["c"]).values, train(backbone, [TRIALS[2]])["c"].values)
