"""Corrections from steps that ran: right for a pace that changed, unmoved by bursts, and silent at first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.refine import ENOUGH, TOLERANCE, WINDOW, Refinement

_PASSES = st.lists(st.floats(1e-3, 10), min_size=ENOUGH, max_size=2 * WINDOW)


@given(_PASSES, st.floats(0.1, 10))
def test_a_pace_that_changed_is_found_exactly(predicted: list[float], pace: float) -> None:
    refinement = Refinement()
    refinement.learn((one, pace * one) for one in predicted)
    assert refinement.scale == pytest.approx(pace)
    assert refinement.drifted == (not 0.8 <= refinement.scale <= 1 + TOLERANCE)
    refinement.planned_anew()
    assert refinement.drift == pytest.approx(0) and not refinement.drifted and refinement.scale == pytest.approx(pace)


def test_a_few_passes_say_nothing_and_a_burst_says_little() -> None:
    refinement = Refinement(1.2)
    refinement.learn([(1.0, 9.0)] * (ENOUGH - 1))
    assert refinement.scale == 1.2 and not refinement.drifted
    refinement.learn([(1.0, 1.2)] * ENOUGH)
    assert refinement.scale == 1.2


def test_seconds_count_not_passes() -> None:
    """Many small passes that take twice as long do not hide the few large ones that are as predicted."""
    refinement = Refinement()
    refinement.learn([(0.01, 0.02)] * 40 + [(1.0, 1.0)] * 10)
    assert refinement.scale == 1.0


def test_old_passes_are_forgotten_and_nothing_predicted_is_no_pass() -> None:
    refinement = Refinement()
    refinement.learn([(1.0, 5.0)] * WINDOW)
    assert refinement.drifted and refinement.drift == pytest.approx(4)
    refinement.learn([(0.0, 3.0), (3.0, 0.0)] * WINDOW)
    assert refinement.scale == 5
    refinement.learn([(1.0, 1.1)] * WINDOW)
    assert refinement.scale == 1.1 and not refinement.drifted
