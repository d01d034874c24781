"""Jobs that wait for memory, as users see them: real processes, with adapters that are large for the limit."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from muxtune.cli.main import run
from tests.cli.projects import TRAINED, rows, status, write_config
from tests.cli.shell import Shell

WIDE = {**TRAINED["sql"], "validation": None, "peft": {"r": 1024}, "save_total_limit": 1}
JOBS = {name: {**WIDE, "seed": seed} for seed, name in enumerate(("first", "second", "third"))}
LIMIT_SHARE = 0.5  # of an adapter, beyond what one job needs


@pytest.fixture(scope="module")
def limit(shell: Shell, project: Path, tiny_llama: Path) -> str:
    """Bytes that suffice for one of the jobs at a time, as a dry run without a limit tells them."""
    write_config(project / "roomy.yaml", tiny_llama, "roomy", {"first": JOBS["first"]})
    memory = json.loads(shell.run("train", "roomy.yaml", "--dry-run", "--json").out)["memory"]
    return str(memory["peak_bytes"] + int(LIMIT_SHARE * memory["adapter_bytes"]))


def test_a_dry_run_says_who_waits(
    project: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device: (0, 10**12))
    write_config(project / "plan.yaml", tiny_llama, "plan", JOBS)
    assert run(["train", "plan.yaml", "--dry-run", "--json"]) == 0
    roomy = json.loads(capsys.readouterr().out)
    assert roomy["memory"]["waiting"] == [] and not any(job["waits"] for job in roomy["jobs"])
    one = roomy["jobs"][0]["adapter_bytes"]
    limit = roomy["memory"]["peak_bytes"] - one // 2
    config = write_config(project / "plan.yaml", tiny_llama, "plan", JOBS, memory_limit=limit)
    assert run(["train", str(config), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["waiting"] == ["third"]
    assert [job["waits"] for job in found["jobs"]] == [False, False, True]
    assert found["memory"]["peak_bytes"] <= roomy["memory"]["peak_bytes"] - one
    assert run(["train", str(config), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "jobs: 2 start at once, and that is their memory; 1 wait for memory and start as others end: third" in told
    assert not (project / "plan").exists()


def test_one_after_the_other(shell: Shell, project: Path, tiny_llama: Path, limit: str) -> None:
    write_config(project / "turns.yaml", tiny_llama, "turns", JOBS, memory_limit=limit)
    ended = shell.run("train", "turns.yaml")
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    assert [line for line in lines if re.match(r"(second|third) queued, 4 steps: waits for memory: its adapter", line)]
    told = [line.split()[:2] for line in lines if " started " in line or " completed " in line]
    assert told == [[name, kind] for name in JOBS for kind in ("started", "completed")]
    write_config(project / "whole.yaml", tiny_llama, "whole-turns", {"third": JOBS["third"]}, memory_limit=limit)
    assert shell.run("train", "whole.yaml").code == 0
    ours, theirs = (project / run / "third/adapter_model.safetensors" for run in ("turns", "whole-turns"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_ctrl_c_while_some_wait(shell: Shell, project: Path, tiny_llama: Path, limit: str) -> None:
    """They stay startable, and are not said to have been trained."""
    jobs = {**JOBS, "first": {**JOBS["first"], "max_steps": 400}}
    write_config(project / "halt.yaml", tiny_llama, "halt", jobs, memory_limit=limit)
    running = shell.start(["train", "halt.yaml"])
    running.until(lambda: len(rows(project / "halt/first")) > 3)
    running.signal(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 130 and "stopped; every task is saved" in ended.err
    table = {line.split()[0]: line for line in ended.out.splitlines()}
    assert re.match(r"first +stopped +\d+/400", table["first"])
    assert re.match(r"third +not started +0/4", table["third"])
    assert status(project / "halt/third") == "queued" and not rows(project / "halt/third")
    assert shell.run("train", "halt.yaml").code == 2
    done = len(rows(project / "halt/first"))
    again = shell.start(["train", "halt.yaml", "--resume"])
    again.until(lambda: len(rows(project / "halt/first")) > done)
    again.signal(signal.SIGKILL)
    assert again.wait().code == -signal.SIGKILL and not rows(project / "halt/third")
    write_config(project / "halt.yaml", tiny_llama, "halt", {name: jobs[name] for name in ("second", "third")})
    last = shell.run("train", "halt.yaml", "--resume")
    assert last.code == 0 and "third started step=0/4" in last.err
    assert [row["train/global_step"] for row in rows(project / "halt/third")] == [1, 2, 3, 4]
