"""What others took of the processors is told from what this process took."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from muxtune.engine.bystanders import Used, others_since, used


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (Used(20.0, 9.0, 6.0), 0.15),  # of 10 more seconds 4.5 were used, 3 of them here
        (Used(20.0, 6.5, 6.0), 0.0),
        (Used(10.0, 4.5, 3.0), 0.0),
    ],
    ids=["some", "counters that are out of step", "no time"],
)
def test_the_rest_of_what_was_used_is_that_of_others(after: Used, share: float) -> None:
    assert others_since(Used(10.0, 4.5, 3.0), lambda: after) == pytest.approx(share)


def test_a_process_that_spins_is_seen_and_this_one_is_not() -> None:
    if not hasattr(psutil.Process, "cpu_affinity"):
        pytest.skip("the system does not say which processors there are")
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = used()
        time.sleep(0.6)
        seen, spun_s = others_since(before), sum(psutil.Process(spinning.pid).cpu_times()[:2])
    finally:
        spinning.kill()
        spinning.wait()
    processors = len(psutil.Process().cpu_affinity())
    assert seen > 0.3 * spun_s / (0.6 * processors) > 0
