"""Records of rounds as lines of JSON: nothing is lost on the way but log-probabilities."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxtune.plan.trace import from_line, to_line
from muxtune.plan.types import (
    ActionRecord,
    ItemOutcome,
    OptimStep,
    PairSums,
    Plan,
    RoundRecord,
    RoundSchedule,
    StepOutcome,
)
from tests.plan.rounds import plans

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def records(draw: st.DrawFn) -> RoundRecord:
    schedule = draw(st.from_type(RoundSchedule))
    pairs = st.none() | st.builds(PairSums, st.integers(0, 9), NUMBERS, NUMBERS)
    counts = st.integers(0, 10**9)
    kinds = st.sampled_from(["train", "eval", "reference"])
    item = st.builds(ItemOutcome, st.none() | st.text(), kinds, NUMBERS, counts, counts, counts, pairs=pairs)
    text = st.none() | st.text()
    step = st.builds(
        StepOutcome, st.text(), counts, NUMBERS, NUMBERS, counts, counts, NUMBERS, NUMBERS, error=text, pairs=pairs
    )
    action = st.builds(
        ActionRecord, counts, NUMBERS, NUMBERS, counts, st.lists(item, max_size=3).map(tuple), st.none() | step
    )
    return RoundRecord(schedule, tuple(draw(st.lists(action, max_size=3))), draw(NUMBERS))


@settings(max_examples=60)
@given(records())
def test_a_record_is_one_line_and_comes_back(record: RoundRecord) -> None:
    # a rate that is not finite is illegal, and never runs
    actions = [
        replace(action, lr=0.5) if isinstance(action, OptimStep) and action.lr is not None else action
        for action in record.schedule.actions
    ]
    record = replace(record, schedule=replace(record.schedule, actions=tuple(actions)))
    losses_ok = all(
        item.loss is None or math.isfinite(item.loss.beta)
        for action in actions
        if not isinstance(action, OptimStep)
        for item in action.items
    )
    line = to_line(record)
    assert line.endswith("\n") and line.count("\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert not losses_ok or from_line(line) == record


@given(plans())
def test_a_plan_is_one_line_and_comes_back(plan: Plan) -> None:
    line = to_line(plan)
    assert line.endswith("\n") and line.count("\n") == 1
    assert from_line(line) == plan


def test_numbers_that_are_not_finite_come_back_as_nan() -> None:
    step = StepOutcome("one", 3, math.inf, 0.5, 4, 9, math.nan, 1e-3, "non_finite_loss: the loss is inf")
    record = RoundRecord(RoundSchedule(3, (OptimStep("one"),)), (ActionRecord(0, 0.0, 0.1, step=step),), 0.1)
    (action,) = _come_back(record).actions
    assert action.step is not None and math.isnan(action.step.loss) and math.isnan(action.step.grad_norm)
    assert replace(action.step, loss=0, grad_norm=0) == replace(step, loss=0, grad_norm=0)


def _come_back(record: RoundRecord) -> RoundRecord:
    found = from_line(to_line(record))
    assert isinstance(found, RoundRecord)
    return found


def test_log_probabilities_are_left_out() -> None:
    item = ItemOutcome("one", "reference", 3.0, 2, 1, 5, logprobs=(-1.0, -2.0))
    record = RoundRecord(RoundSchedule(0, ()), (ActionRecord(0, 0.0, 0.1, 16, (item,)),), 0.1)
    assert _come_back(record).actions[0].items == (replace(item, logprobs=None),)


PLANS = ['{"plan": 3}', '{"plan": {"policy": "padded"}}']
RECORDS = ['{"schedule": 3, "wall_s": 1}', '{"schedule": {"round": 1}}']


@pytest.mark.parametrize("line", ["", "{}", "[]", "7", *PLANS, *RECORDS])
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)
