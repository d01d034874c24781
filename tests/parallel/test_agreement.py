"""What ranks came to is the same, or the run is over."""

from __future__ import annotations

from muxtune.engine.agreement import agree
from muxtune.engine.followers import Outcome
from muxtune.errors import RankError
from muxtune.parallel.channel import open_channel
from muxtune.parallel.mesh import TensorAxis
from muxtune.plan.types import ActionRecord, RoundRecord, RoundSchedule, StepOutcome
from tests.parallel.ranks import RankGroup


def _said(axis: TensorAxis, steps: tuple[int, int]) -> str:
    """Of ranks whose task has made so many steps each."""
    step = StepOutcome("task", steps[axis.rank], 1.0, 0.5, 4, 4, 1.0, 1e-3)
    record = RoundRecord(RoundSchedule(0, ()), (ActionRecord(0, 0.0, 1.0, step=step),), 1.0)
    try:
        agree(open_channel(axis, range(axis.size), timeout_s=60), Outcome(record), None)
    except RankError as error:
        return str(error)
    return ""


def test_ranks_that_come_to_the_same_go_on_and_others_are_told_what_to_do(pair: RankGroup) -> None:
    assert pair.ask(_said, (3, 3)) == ["", ""]
    for said in pair.ask(_said, (3, 4)):
        assert "the ranks have come to different results" in said
        assert "then start the run again with --resume: it goes on from its newest checkpoints" in said
