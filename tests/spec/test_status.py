"""The legal moves of a job."""

from __future__ import annotations

import pytest

from muxtune.errors import StateError
from muxtune.spec import JobStatus

Q, R, P = JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED
DONE, FAILED, CANCELLED = JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED
LEGAL = {(Q, R), (Q, P), (R, P), (R, Q), (R, DONE), (P, R), (P, Q)} | {
    (start, end) for start in (Q, R, P) for end in (FAILED, CANCELLED)
}


@pytest.mark.parametrize("old", JobStatus)
@pytest.mark.parametrize("new", JobStatus)
def test_moves(old: JobStatus, new: JobStatus) -> None:
    assert old.may_become(new) == ((old, new) in LEGAL)
    if (old, new) in LEGAL:
        assert old.become(new, job="a") is new
    else:
        with pytest.raises(StateError, match=f"a {old} job cannot become {new}"):
            old.become(new, job="a")


def test_final_states() -> None:
    assert {status for status in JobStatus if status.final} == {DONE, FAILED, CANCELLED}
    assert JobStatus("paused") is P
