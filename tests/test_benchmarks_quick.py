"""The quick benchmark: what falls under its guard is said, and ends in 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import quick, race
from benchmarks.folders import model_folder
from benchmarks.loads import light
from benchmarks.quick import GUARDS, Guard, Verdict
from benchmarks.race import AGAINST_PEFT, ROOFLINE, RaceResult
from muxtune.engine.load import load_backbone
from tests.tiny import tiny_folder
from tests.tiny_tokenizer import VOCAB

RESULT = RaceResult("light", (128,), (64,), 1.0, {}, {AGAINST_PEFT: 3.0, ROOFLINE: 0.6}, 0.0, 1e-4)


def test_every_load_has_a_guard_and_rounds() -> None:
    assert GUARDS.keys() == quick.ROUNDS.keys() == quick.LOADS.keys()
    assert all(guard.peft > 1 and 0 < guard.roofline < 1 for guard in GUARDS.values())


@pytest.mark.parametrize(
    ("result", "guard", "told"),
    [
        (RESULT, Guard(3.0, 0.6), []),
        (RESULT, Guard(3.1, 0.5), ["light: 3.00x transformers + peft, at least 3.10x wanted"]),
        (RESULT, Guard(2.9, 0.61), ["light: 60% of the roofline, at least 61% wanted"]),
        (replace(RESULT, loss_gap=1e-3), Guard(1, 0.1), ["light: final losses are 1.0e-03 apart"]),
        (replace(RESULT, ratios={AGAINST_PEFT: float("nan"), ROOFLINE: 0.6}), Guard(1, 0.1), ["light: nanx"]),
    ],
)
def test_what_is_under_its_guard_is_said(result: RaceResult, guard: Guard, told: list[str]) -> None:
    faults = Verdict(result, guard).faults
    assert len(faults) == len(told) and all(fault.startswith(start) for fault, start in zip(faults, told, strict=True))


def test_quick_races_and_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "MODEL", str(tiny_folder(tmp_path, "llama-tied")))
    monkeypatch.setattr(quick, "LAYERS", 1)
    monkeypatch.setattr(quick, "VOCABULARY", 160)
    seen: list[RaceResult] = []
    _keep(monkeypatch, seen)
    for guard, status in ((Guard(0.0, 0.0), 0), (Guard(1e6, 0.0), 1)):
        monkeypatch.setattr(quick, "GUARDS", {"light": guard})
        assert quick.main(["--rounds", "2"]) == status
    assert seen[0].sides.keys() == {race.FUSED, race.PEFT, race.FLOOR_FUSED}
    printed = capsys.readouterr().out
    assert "all ratios are above their guards" in printed and "UNDER ITS GUARD: light" in printed


def _keep(monkeypatch: pytest.MonkeyPatch, seen: list[RaceResult]) -> None:
    run: Callable[..., RaceResult] = race.race

    def kept(*arguments: object, **options: object) -> RaceResult:
        seen.append(run(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(quick, "race", kept)


def test_the_cut_model_has_fewer_layers_and_a_smaller_vocabulary(tmp_path: Path) -> None:
    with model_folder(str(tiny_folder(tmp_path, "llama-tied")), 1, vocabulary=VOCAB // 2) as folder:
        backbone = load_backbone(folder, device="cpu", dtype="fp32")
    assert len(backbone.blocks) == 1 and backbone.vocabulary == VOCAB // 2
    assert light(1, vocab=backbone.vocabulary).tasks[0][0][0].ids.max() < VOCAB // 2
