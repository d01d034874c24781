"""Memory that runs out for real: who needs too much fails alone, or computes twice where that helps; others go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the data segment is Linux's")
def test_under_a_limit_the_task_that_does_not_fit_fails_alone() -> None:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.starved"], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["failed"]) == ["large"] and "memory" in found["failed"]["large"].lower()
    assert sorted(found["spared"]) == ["large", "tight"], "both were tried once more"
    assert found["equal"] == {"one": True, "two": True, "large": False, "tight": True, "three": True}
