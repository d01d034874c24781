"""What goes wrong around a run - the disk, the terminal, the names of files - as users meet it."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.projects import TRAINED, rows, status, write_config
from tests.cli.shell import LINES, Shell, Terminal

ONE = {"sql": TRAINED["sql"]}
UP = re.compile(r"(?:\x1b\[1A\x1b\[2K)+")


def test_a_full_disk_while_it_trains(shell: Shell, project: Path, tiny_llama: Path) -> None:
    """Small files are taken, the checkpoint's tensors are not: said once, in words, and with room the run goes on."""
    write_config(project / "full.yaml", tiny_llama, "full", ONE)
    ended = shell.start(["train", "full.yaml"], file_bytes=4000).wait()
    assert ended.code == 1 and "Traceback" not in ended.err and "fault of muxtune" not in ended.err
    complaint = re.search(
        r"^error: full/sql: this run's folder cannot be written: (.*)\n  free some space", ended.err, re.M
    )
    assert complaint and "File too large" in complaint[1]
    assert ended.err.splitlines()[-1] == "0 of 1 job completed"
    assert re.search(r"^sql +running +3/4", ended.out, re.M)
    assert not list((project / "full").rglob("*.staged"))
    resumed = shell.run("train", "full.yaml", "--resume")
    assert resumed.code == 0 and status(project / "full/sql") == "completed"
    assert [row["train/global_step"] for row in rows(project / "full/sql") if "train/loss" in row] == [1, 2, 3, 4]


def test_a_disk_that_is_full_from_the_start(shell: Shell, project: Path, tiny_llama: Path) -> None:
    write_config(project / "none.yaml", tiny_llama, "none", ONE)
    ended = shell.start(["train", "none.yaml"], file_bytes=0).wait()
    assert ended.code in (1, 2) and "Traceback" not in ended.err and "fault of muxtune" not in ended.err
    assert shell.run("train", "none.yaml", "--overwrite").code == 0


@pytest.mark.full
def test_fifty_jobs_on_a_small_terminal(shell: Shell, project: Path, tiny_llama: Path) -> None:
    job = {"datasets": ["data/sql.jsonl"], "max_steps": 1, "peft": {"r": 1, "target_modules": ["q_proj"]}}
    write_config(project / "fifty.yaml", tiny_llama, "fifty", {f"job-{number:02d}": job for number in range(50)})
    terminal = Terminal(columns=80)
    ended = shell.start(["train", "fifty.yaml"], terminal=terminal).wait()
    screen = terminal.read()
    terminal.close()
    assert ended.code == 0 and "50 jobs" in screen and "50 of 50 jobs completed" in screen
    frames = UP.findall(screen)
    assert frames and max(frame.count("A") for frame in frames) < LINES, "the table is higher than the screen"
    live = screen[: screen.rindex(frames[-1])]
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live).splitlines()) <= 80


def test_names_that_are_no_utf8(shell: Shell, project: Path, tiny_llama: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    try:
        (project / name).mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    shutil.copy(project / "data/sql.jsonl", project / name / "sql.jsonl")
    write_config(project / name / "c.yaml", tiny_llama, "utf", {"sql": {"datasets": ["sql.jsonl"]}})
    assert shell.run("data", "check", f"{name}/sql.jsonl").code == 0
    assert shell.run("train", f"{name}/c.yaml").code == 0 and status(project / "utf/sql") == "completed"
    assert shell.run("train", f"{name}/c.yaml", "--resume").code == 0
    assert shell.run("sample", "utf/sql", "Hello", "--max-new-tokens", "2").code == 0
    assert shell.run("export", "utf/sql", "--format", "peft", "--out", name + "/out", "--base-name", "a/b").code == 0
    refused = shell.run("train", f"{name}/nothing.yaml")
    assert refused.code == 2 and "cannot be read" in refused.err and "Traceback" not in refused.err


@pytest.mark.parametrize("empty", ["datasets", "validation"])
def test_empty_files(empty: str, shell: Shell, project: Path, tiny_llama: Path) -> None:
    keys = {"datasets": ["data/empty.jsonl"]} if empty == "datasets" else {"validation": {"path": "data/empty.jsonl"}}
    write_config(project / f"empty-{empty}.yaml", tiny_llama, f"empty-{empty}", {"sql": {**TRAINED["sql"], **keys}})
    refused = shell.run("train", f"empty-{empty}.yaml")
    assert refused.code == 2 and "data/empty.jsonl: the file is empty" in refused.err
    assert not (project / f"empty-{empty}/sql").exists()


def test_two_runs_at_once_in_one_folder(shell: Shell, project: Path, tiny_llama: Path) -> None:
    """The second is refused while the first trains, and not once it has been killed."""
    write_config(
        project / "two.yaml", tiny_llama, "two", {"sql": {**TRAINED["sql"], "max_steps": 400, "save_steps": 5}}
    )
    first = shell.start(["train", "two.yaml"])
    first.until(lambda: len(rows(project / "two/sql")) > 8)
    for options in ([], ["--resume"], ["--overwrite"]):
        refused = shell.run("train", "two.yaml", *options)
        assert refused.code == 2 and ("another process" in refused.err or "holds a run" in refused.err)
    first.signal(signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    again = shell.run("train", "two.yaml", "--overwrite", "--set", "max_steps=2")
    assert again.code == 0 and status(project / "two/sql") == "completed"
