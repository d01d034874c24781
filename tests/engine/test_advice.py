"""Numbers that are not finite come with what to do about them."""

from __future__ import annotations

import pytest

from muxtune.engine.advice import advice


@pytest.mark.parametrize(
    ("code", "step", "told"),
    [
        ("non_finite_loss", 0, "look at what it begins with: its data (muxtune data preview)"),
        ("non_finite_loss", 7, "lower its learning_rate (it was 0.002 here) or warm up longer"),
        ("non_finite_gradient", 7, "lower its learning_rate"),
        ("non_finite_weights", 7, "under a new name: a job that is resumed does the same again"),
    ],
)
def test_what_to_do(code: str, step: int, told: str) -> None:
    assert told in str(advice(code, step, 0.002))


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert advice("exception", 3, 0.1) is None
