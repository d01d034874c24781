"""Timelines as SVG: to scale, escaped, and what a record says ran."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.cli.chart import PALETTE, Block, Chart, groups, legend, nice_step, seconds_text, svg
from muxtune.cli.measured import measured_chart, train_rounds
from muxtune.cli.trace import _totals
from muxtune.plan.types import (
    ActionRecord,
    LossSpec,
    MicroBatch,
    OptimStep,
    RoundRecord,
    RoundSchedule,
    SequenceRef,
    StepOutcome,
    WorkItem,
)

SVG = "{http://www.w3.org/2000/svg}"


def _drawn(chart: Chart, **options: float) -> ElementTree.Element:
    markup = str(svg(chart, **options)).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return ElementTree.fromstring(markup)


def _boxes(chart: Chart, **options: float) -> list[tuple[float, float]]:
    """(x, width) of each block."""
    found = [one for one in _drawn(chart, **options).iter(f"{SVG}rect") if one.get("class", "").startswith("b ")]
    return [(float(one.get("x", "")), float(one.get("width", ""))) for one in found]


def test_blocks_are_to_scale() -> None:
    blocks = (Block(0, 0.0, 1.0, "pass", 0, "a", ""), Block(0, 1.0, 4.0, "pass", 1, "b", ""))
    (first, second), (half, _) = (
        _boxes(Chart("t", ("l",), blocks, 4.0)),
        _boxes(Chart("t", ("l",), blocks, 4.0), scale_s=8),
    )
    assert second[1] == pytest.approx(3 * first[1], rel=0.01)
    assert second[0] == pytest.approx(first[0] + first[1], abs=0.1)
    assert half[1] == pytest.approx(first[1] / 2, rel=0.01)


def test_a_name_cannot_write_markup() -> None:
    name = '"><script>alert(1)</script>'
    drawn = str(svg(Chart(name, (name,), (Block(0, 0, 1, "pass", 0, name, name),), 1.0)))
    assert "<script" not in drawn
    _drawn(Chart(name, (name,), (Block(0, 0, 1, "pass", 0, name, name),), 1.0))


def test_idle_time_is_drawn_where_a_lane_says_so() -> None:
    kinds = [one.get("class") for one in _drawn(Chart("t", ("a", "b"), (), 1.0, frozenset({1}))).iter(f"{SVG}rect")]
    assert kinds == ["lane", "idle"]


@given(st.floats(1e-6, 1e6))
def test_ticks_are_round_numbers(least: float) -> None:
    step = nice_step(least)
    assert least * (1 - 1e-9) <= step <= 2.5 * least * (1 + 1e-9)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.34, "2.3 s"), (0.234, "0.23 s"), (0.0123, "12 ms"), (0.000123, "0.12 ms"), (0.0, "0.0 s")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_long_names_are_cut_in_the_middle() -> None:
    names = tuple(f"{'long-' * 25}{number}" for number in range(3))
    shown = [one.text for one in _drawn(Chart("t", names, (), 1.0)).iter(f"{SVG}text") if one.get("class") == "name"]
    assert len(set(shown)) == 3 and all(len(one or "") < 40 for one in shown)


def test_the_legend_has_the_colour_of_each_htask() -> None:
    blocks = tuple(Block(0, at, at + 1, "pass", at, "", "") for at in range(10))
    drawn = str(legend([("pass", "a pass")], groups(Chart("t", ("l",), blocks, 10.0))))
    assert all(colour in drawn for colour in PALETTE) and "hTask 7" in drawn and "8 colours again" in drawn


def test_a_legend_names_each_kind() -> None:
    assert str(legend([("pass", "a pass"), ("step", "a < b")])).count("<svg") == 2
    assert "a &lt; b" in legend([("step", "a < b")])


def _record(number: int, *tasks: str) -> RoundRecord:
    items = tuple(WorkItem(name, "train", f"{name}/train", (SequenceRef(0, 5),), LossSpec(1)) for name in tasks)
    actions = (MicroBatch(1, 0, items), *(OptimStep(name) for name in tasks))
    passes = ActionRecord(0, 0.0, 0.5, 16)
    steps = [
        ActionRecord(at, 0.5 + at / 100, 0.51 + at / 100, step=StepOutcome(name, number, 1, 0, 1, 5, 1, 1))
        for at, name in enumerate(tasks, 1)
    ]
    return RoundRecord(RoundSchedule(number, actions), (passes, *steps), 1.0)


def test_a_record_becomes_a_lane_for_the_device_and_one_for_each_task() -> None:
    chart = measured_chart([_record(1, "a", "b"), _record(2, "a", "b")], ["a", "b"], "measured")
    assert chart.lanes == ("device", "a", "b") and chart.wall_s == 2.0
    device = sorted((block.start_s, block.end_s) for block in chart.blocks if block.lane == 0)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(device))
    passes = [block for block in chart.blocks if block.kind == "pass"]
    assert [(block.lane, block.start_s) for block in passes] == [
        (0, 0.0),
        (1, 0.0),
        (2, 0.0),
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
    ]
    assert {block.group for block in passes} == {1}
    assert "16 rows" in passes[0].told and "5 tokens" in passes[1].told


def test_a_pass_that_was_kept_is_drawn_as_its_two_ways() -> None:
    """The second goes on from the first and brings no rows of its own; it is a pass all the same."""
    piece, tail = SequenceRef(0, 16, 0, 21), SequenceRef(0, 5, 16, 21)

    def batch(kind: str, ref: SequenceRef, keep: bool) -> MicroBatch:
        item = WorkItem("a", kind, "a/train", (ref,), LossSpec(1) if kind == "train" else None)  # type: ignore[arg-type]
        return MicroBatch(0, 0, (item,), keep=keep)

    actions = batch("carry", piece, True), batch("train", tail, False), batch("train", piece, True)
    ran = tuple(ActionRecord(at, at, at + 1, rows) for at, rows in enumerate((16, 16, 0)))
    record = RoundRecord(RoundSchedule(1, actions), ran, 3.0)
    device = [block for block in measured_chart([record], ["a"], "measured").blocks if block.lane == 0]
    assert [(block.kind, block.label) for block in device] == [("carry", "16"), ("pass", "16"), ("backward", "16")]
    assert "0 rows" not in device[-1].told and _totals([record])["passes"] == 3


def test_rounds_of_all_tasks_are_what_is_compared() -> None:
    records = [_record(1, "a"), _record(2, "a", "b"), _record(3, "a", "b"), _record(4, "b")]
    assert [one.schedule.round for one in train_rounds(records, ["a", "b"], 5)] == [2, 3]
    assert [one.schedule.round for one in train_rounds(records, ["a", "b"], 1)] == [3]
    assert train_rounds([], ["a"], 2) == []
