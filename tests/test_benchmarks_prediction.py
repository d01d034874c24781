"""The benchmark of predictions: mixes that a seed fixes, errors of what ran, and nothing left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import prediction
from benchmarks.prediction import LEAST_LENGTH, Outcome, Report, draw, run_mix
from muxtune.engine.engine import Engine
from muxtune.plan.profile import OperatorTable
from tests.engine.build import backbone_of
from tests.plan.tables import table


def test_a_mix_is_its_seed_s_and_number_s() -> None:
    mixes = [draw(5, number) for number in range(40)]
    assert mixes == [draw(5, number) for number in range(40)] != [draw(6, number) for number in range(40)]
    assert len({len(mix.members) for mix in mixes}) > 8 and {mix.policy for mix in mixes} == set(prediction.POLICIES)
    members = [member for mix in mixes for member in mix.members]
    lengths = [length for member in members for length in member.lengths]
    assert LEAST_LENGTH <= min(lengths) < 16 and 400 < max(lengths) <= prediction.MOST_LENGTH
    assert {member.method for member in members} == {"sft", "dpo"}
    assert len({member.peft.type for member in members}) >= 8
    assert all(len(member.lengths) % 2 == 0 for member in members if member.method == "dpo")


def test_the_error_is_of_exactly_what_ran() -> None:
    """And nothing stays attached."""
    engine = Engine(backbone_of(layers=1))
    made_up = table(16, layers=1)
    for number in range(3):
        mix = draw(1, number, most_length=100, most_rows=200)
        found = run_mix(engine, made_up, mix, rounds=1, clock=time.perf_counter)
        assert not engine.tasks and not engine.sources
        assert found.error == pytest.approx(found.predicted_s / found.measured_s - 1)
        assert found.predicted_s >= found.passes * 2e-3, "two directions of a layer, each 1 ms at the least"
        assert found.rows >= 16 * found.passes > 0


def test_a_report_is_the_quantiles_of_its_errors() -> None:
    outcomes = tuple(Outcome(n, "", "padded", 1, 16, 1.0, 1.0, error) for n, error in enumerate((-0.1, 0.3, 0.0, -0.2)))
    report = Report(outcomes)
    assert report.quantile(0.5) == pytest.approx(0.15) and report.quantile(1.0) == 0.3
    assert report.bias == pytest.approx(-0.05)
    slow = Outcome(0, "", "padded", 1, 16, 1.0, 2.0, -0.5, pace=2.0)
    assert Report((slow,)).quantile(0.5) == 0.5 and Report((slow,)).quantile(0.5, paced=True) == 0.0


def test_the_command_prints_the_figures_and_writes_them(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(backbone: object, **_: object) -> OperatorTable:
        return table(layers=1)

    monkeypatch.setattr(prediction, "measure", measure)
    out = tmp_path / "out.json"
    arguments = ["--mixes", "2", "--rounds", "1", "--layers", "1", "--model", str(tiny_llama), "--out", str(out)]
    assert prediction.main([*arguments, "--cpu-time"]) == 0
    printed = capsys.readouterr().out
    assert "|error|: median" in printed and "p90" in printed and printed.count("predicted") >= 4
    assert [one["number"] for one in json.loads(out.read_text())["outcomes"]] == [0, 1]
