"""Wrong use of the command line, and faults of the program itself: exit status, and words instead of tracebacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from muxtune.cli import config as config_command
from muxtune.cli.main import main, run
from tests.cli.projects import TRAINED, write_config


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "a.yaml", "--resum"], "No such option: --resum"),
        (["train", "a.yaml", "--resume", "--overwrite"], "choose one"),
        (["train", "a.yaml", "--json"], "--json belongs to --dry-run"),
        (["tran"], "No such command 'tran'"),
        (["data", "preview", "f.jsonl", "-n", "0"], "-n"),
        (["data", "preview", "f.jsonl", "--job", "sql"], "--job names a job of --config"),
        (["sample", "runs/sql", "hello", "--temperature", "-1"], "--temperature"),
        (["export", "runs/sql", "--format", "gguf"], "--format"),
        (["export", "runs/sql", "--format", "merged"], "--format merged needs --out"),
        (["export", "runs/sql"], "where to?"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["sample", "hello"], "the prompt comes last"),
        (["sample", "runs/a", "runs/b", "hello"], "ask them all with --compare"),
        (["sample", ".", "."], "is a folder where the prompt should be"),
        (["sample", "nowhere", "hello"], "neither an adapter folder nor a run"),
        (["sample", "say " * 1000, "runs/sql"], "neither an adapter folder nor a run"),
        (["sample", "runs/sql", ""], "the prompt is empty"),
        (["data", "check", "data/sql.jsonl", "--type", "completion"], "say prompt_completion"),
        (["data", "check", "data/sql.jsonl", "--base-model", "nothing-like-it"], "there is no model 'nothing-like-it'"),
        (["models", "pull", "nothing-like-it"], "there is no model 'nothing-like-it'"),
    ],
)
def test_wrong_use(
    arguments: Sequence[str],
    told: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and "Traceback" not in err and "\x1b" not in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base_model: m\noutput_dir: o\njobs: [{name: a, dataset: x}]\n", "three.yaml:3"),
        ("base_model: [\n", "three.yaml:"),
        ("", "three.yaml"),
    ],
)
def test_a_wrong_config_names_its_line(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("three.yaml").write_text(text)
    for command in (["train", "three.yaml"], ["config", "print", "three.yaml"]):
        assert run(command) == 2
        assert f"error: {told}" in capsys.readouterr().err


def test_nothing_at_all_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in "".join(capsys.readouterr())


def test_a_fault_of_the_program(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback is kept for a report and not thrown at the user, who may ask for it."""
    path = str(write_config(tmp_path / "c.yaml", tiny_llama, "o", TRAINED))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("muxtune.spec.render.render_yaml", lambda resolved: 1 // 0)
    assert config_command.app is not None and run(["config", "print", path]) == 1
    err = capsys.readouterr().err
    (log,) = tmp_path.glob("muxtune-*.log")
    assert "error: ZeroDivisionError" in err and str(log) in err and "Traceback" not in err
    assert "Traceback" in log.read_text() and log.stat().st_mode & 0o077 == 0
    for asked in (["--debug", "config", "print", path], ["config", "print", path, "--debug"]):
        assert run(asked) == 1
        assert "Traceback" in capsys.readouterr().err
    assert run(["config", "print", "--", "--debug"]) == 2, "that is the name of a file"
    assert "error: --debug: cannot be read" in capsys.readouterr().err


def test_a_full_disk_is_no_fault_of_the_program(
    project: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(resolved: object) -> str:
        raise OSError(28, "No space left on device", "o/x")

    path = str(write_config(project / "full.yaml", tiny_llama, "o", TRAINED))
    monkeypatch.setattr("muxtune.spec.render.render_yaml", refuse)
    assert run(["config", "print", path]) == 1
    assert capsys.readouterr().err == "error: No space left on device: o/x\n"


def test_main_exits_with_the_status() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert ended.value.code == 0


def test_a_reader_that_goes_away(project: Path, tiny_llama: Path, environment: dict[str, str]) -> None:
    """`muxtune config print three.yaml | true`: no traceback, no complaint."""
    path = write_config(project / "pipe-closed.yaml", tiny_llama, "o", TRAINED)
    command = [sys.executable, "-c", "from muxtune.cli.main import main; main()", "config", "print", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (1, 141) and complaint == b""


def test_a_misspelt_module_is_told_with_its_line_and_the_names_there_are(
    project: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    config = write_config(project / "typo.yaml", tiny_llama, "typo", {"sql": TRAINED["sql"]})
    config.write_text(config.read_text().replace("- q_proj", "- q_prj"))
    (line,) = (number for number, text in enumerate(config.read_text().splitlines(), 1) if "target_modules" in text)
    for arguments in (["--dry-run"], []):
        assert run(["train", "typo.yaml", *arguments]) == 2
        told = capsys.readouterr().err
        assert f"typo.yaml:{line} jobs.sql.peft.target_modules: 'q_prj' is nothing" in told
        assert "did you mean 'q_proj'? it has: down_proj, " in told
