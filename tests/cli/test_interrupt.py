"""Ctrl-C and its kin, sent to real processes: everything is saved, and the resumed run ends as if nothing had been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from muxtune.cli.main import run
from tests.cli.projects import TRAINED, rows, status, write_config
from tests.cli.shell import Running, Shell, Terminal

STEPS = 30
JOBS = {
    "sql": {**TRAINED["sql"], "max_steps": STEPS, "validation": None},
    "chat": {**TRAINED["chat"], "max_steps": STEPS, "peft": {"lora_dropout": 0.1}},
}


@pytest.fixture(scope="module")
def undisturbed(shell: Shell, project: Path, tiny_llama: Path) -> Path:
    write_config(project / "whole.yaml", tiny_llama, "whole", JOBS)
    assert shell.run("train", "whole.yaml").code == 0
    return project / "whole"


def _steps(folder: Path) -> list[int]:
    return [row["train/global_step"] for row in rows(folder) if "train/loss" in row]


def _after_steps(running: Running, folder: Path, count: int) -> None:
    running.until(lambda: len(_steps(folder)) >= count)


def _check_resumed(shell: Shell, config: str, folder: Path, undisturbed: Path) -> None:
    """It stopped in the middle; resumed, it comes to the undisturbed run's bits."""
    done = _steps(folder / "sql")
    assert 0 < len(done) < STEPS and status(folder / "sql") == "queued"
    assert (folder / f"sql/checkpoints/step-{done[-1]:08d}/manifest.json").exists()
    ended = shell.run("train", config, "--resume")
    assert ended.code == 0 and f"sql resumed step={done[-1]}/{STEPS}" in ended.err
    for name in JOBS:
        assert _steps(folder / name) == list(range(1, STEPS + 1))
        ours, theirs = (run / name / "adapter_model.safetensors" for run in (folder, undisturbed))
        assert ours.read_bytes() == theirs.read_bytes()


def test_ctrl_c_on_a_terminal(shell: Shell, project: Path, tiny_llama: Path, undisturbed: Path) -> None:
    write_config(project / "key.yaml", tiny_llama, "key", JOBS)
    terminal = Terminal()
    running = shell.start(["train", "key.yaml", "--set", "logging_steps=5"], terminal=terminal)
    _after_steps(running, project / "key/sql", 5)
    terminal.press(b"\x03")
    ended = running.wait()
    screen = terminal.read()
    terminal.close()
    assert ended.code == 130
    assert (
        "stopped; every task is saved. Continue with: muxtune train key.yaml --set=logging_steps=5 --resume" in screen
    )
    assert "Traceback" not in screen
    _check_resumed(shell, "key.yaml", project / "key", undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_elsewhere(
    number: signal.Signals, shell: Shell, project: Path, tiny_llama: Path, undisturbed: Path
) -> None:
    name = number.name.lower()
    write_config(project / f"{name}.yaml", tiny_llama, name, JOBS)
    running = shell.start(["train", f"{name}.yaml"])
    _after_steps(running, project / name / "sql", 5)
    running.signal(number)
    ended = running.wait()
    assert ended.code == 130 and "stopping at the end of this step" in ended.err
    assert f"Continue with: muxtune train {name}.yaml --resume" in ended.err
    assert "running" not in ended.out and "stopped" in ended.out
    _check_resumed(shell, f"{name}.yaml", project / name, undisturbed)


def test_insisting_stops_at_once(shell: Shell, project: Path, tiny_llama: Path, undisturbed: Path) -> None:
    write_config(project / "twice.yaml", tiny_llama, "twice", {**JOBS, "sql": {**JOBS["sql"], "save_steps": 2}})
    running = shell.start(["train", "twice.yaml"])
    _after_steps(running, project / "twice/sql", 5)
    running.signal(signal.SIGINT)
    running.signal(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 130 and "Continue with: muxtune train twice.yaml --resume" in ended.err
    assert "Traceback" not in ended.err
    assert shell.run("train", "twice.yaml", "--resume").code == 0
    ours, theirs = (run / "sql/adapter_model.safetensors" for run in (project / "twice", undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def test_before_anything_trains(shell: Shell, project: Path, tiny_llama: Path) -> None:
    """While data is read there is nothing to save: the first signal ends it, and is answered at once."""
    (project / "data/slow.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 200_000)
    write_config(project / "slow.yaml", tiny_llama, "slow", {"slow": {"datasets": ["data/slow.jsonl"]}})
    running = shell.start(["train", "slow.yaml"])
    running.until(lambda: (project / "slow/.muxtune.lock").exists())
    running.signal(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 130 and ended.out == ""
    assert ended.err == "stopping; nothing is being trained yet\nstopped; nothing was trained\n"
    assert not (project / "slow/slow").exists()


def test_before_a_command_has_begun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """While libraries are imported, say: typer alone would end without a word."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("muxtune.spec.load.load_run", interrupted)
    assert run(["train", "any.yaml"]) == 130
    assert capsys.readouterr() == ("", "stopped\n")
