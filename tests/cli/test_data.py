"""`muxtune data`, `config`, `models`, `version` and `doctor`: what is read, shown and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muxtune.cli.main import run
from tests.cli.projects import TRAINED, write_config
from tests.cli.shell import Shell, Terminal

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def test_check(capsys: Capture) -> None:
    assert run(["data", "check", "data/sql.jsonl"]) == 0
    assert capsys.readouterr().out == "data/sql.jsonl: prompt_completion, 6 examples\n"
    assert run(["data", "check", "data/bad.jsonl"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("data/bad.jsonl: 2 bad lines") and "line 2: " in out and "line 3: " in out
    assert run(["data", "check", "data/empty.jsonl"]) == 2
    assert "empty" in capsys.readouterr().out


def test_preference_pairs(tiny_llama: Path, capsys: Capture) -> None:
    assert run(["data", "check", "data/pairs.jsonl"]) == 0
    assert capsys.readouterr().out == "data/pairs.jsonl: preference, 6 examples\n"
    for declared in ([], ["--type", "preference"]):
        assert run(["data", "check", "data/pairs.jsonl", "--base-model", str(tiny_llama), *declared]) == 0
        assert "preference, 6 examples\ntrain: 12 sequences" in capsys.readouterr().out
    assert run(["data", "preview", "data/pairs.jsonl", "-n", "1", "--base-model", str(tiny_llama)]) == 0
    out = capsys.readouterr().out
    assert "pairs.jsonl:1 chosen: " in out and "pairs.jsonl:1 rejected: " in out
    assert "\u27e6yes<|im_end|>\u27e7" in out and "\u27e6no idea<|im_end|>\u27e7" in out


def test_check_with_a_base_model(tiny_llama: Path, capsys: Capture) -> None:
    assert run(["data", "check", "data/chat.jsonl", "--base-model", str(tiny_llama)]) == 0
    assert "train: 4 sequences" in capsys.readouterr().out


def test_check_as_json(capsys: Capture) -> None:
    assert run(["data", "check", "data/bad.jsonl", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and [one["line"] for one in found["problems"]] == [2, 3]
    assert run(["data", "check", "data/sql.jsonl", "--type", "input_output", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 6


def test_preview(tiny_llama: Path, capsys: Capture) -> None:
    assert run(["data", "preview", "data/chat.jsonl", "-n", "1", "--base-model", str(tiny_llama)]) == 0
    out = capsys.readouterr().out
    assert "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}yes<|im_end|>\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}" in out
    assert out.count("data/chat.jsonl:") == 1
    assert run(["data", "preview", "data/chat.jsonl", "--base-model", str(tiny_llama), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trained = ["".join(piece["text"] for piece in one["pieces"] if piece["trained"]) for one in found]
    assert trained == ["yes<|im_end|>", "yes<|im_end|>"]


def test_preview_as_a_job_sees_it(tiny_llama: Path, project: Path, capsys: Capture) -> None:
    jobs = {"sql": TRAINED["sql"], "all": {**TRAINED["chat"], "train_on": "all"}}
    write_config(project / "view.yaml", tiny_llama, "view", jobs)
    command = ["data", "preview", "data/chat.jsonl", "-n", "1", "--config", "view.yaml", "--json"]
    for extra in ([], ["--job", "all"]):  # the job that reads the file is found
        assert run([*command, *extra]) == 0
        (one,) = json.loads(capsys.readouterr().out)
        assert one["trained_tokens"] == one["tokens"] - 1
    assert run([*command, "--job", "nobody"]) == 2
    assert "jobs: sql, all" in capsys.readouterr().err


def test_preview_of_bad_files(tiny_llama: Path, capsys: Capture) -> None:
    model = ["--base-model", str(tiny_llama)]
    assert run(["data", "preview", "data/bad.jsonl", *model]) == 0
    told = capsys.readouterr()
    assert "bad lines are left out here" in told.err and "data/bad.jsonl:1: " in told.out
    assert run(["data", "preview", "data/empty.jsonl", *model]) == 2


def test_preview_is_coloured_on_a_terminal_only(shell: Shell, tiny_llama: Path) -> None:
    command = ["data", "preview", "data/chat.jsonl", "--base-model", str(tiny_llama)]
    terminal = Terminal()
    assert shell.start(command, terminal=terminal).wait().code == 0
    screen = terminal.read()
    terminal.close()
    assert "\x1b[" in screen and "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}" not in screen
    assert "\x1b" not in shell.run(*command).out


def test_config_print(tiny_llama: Path, project: Path, capsys: Capture) -> None:
    write_config(project / "print.yaml", tiny_llama, "print", TRAINED)
    assert run(["config", "print", "print.yaml", "--set", "learning_rate=1e-3", "--set", "jobs.sql.seed=9"]) == 0
    text = capsys.readouterr().out
    assert "# --set learning_rate" in text and "# print.yaml:" in text
    (project / "printed.yaml").write_text(text)
    assert (
        run(["config", "print", "print.yaml", "--set", "learning_rate=1e-3", "--set", "jobs.sql.seed=9", "--json"]) == 0
    )
    first = json.loads(capsys.readouterr().out)
    assert run(["config", "print", "printed.yaml", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["run"] == second["run"], "what is printed is a config of the same run"
    assert [job["seed"] for job in first["run"]["jobs"]] == [7, 9]


def test_models(tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["models", "list", "--json"]) == 0
    assert all(
        {"name", "public_name", "path", "size_bytes"} <= set(model) for model in json.loads(capsys.readouterr().out)
    )
    assert run(["models", "list"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["name", "size"]
    assert run(["models", "pull", str(tiny_llama)]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_llama)
    assert run(["models", "export", str(tiny_llama), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model/model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()
    assert run(["models", "export", str(tiny_llama), str(tmp_path / "model")]) == 2


def test_version_and_doctor(capsys: Capture) -> None:
    assert run(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"muxtune {versions['muxtune']}\n"
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == versions["torch"] and found["threads"] >= 1 and "smollm2-135m-instruct" in found
    assert run(["doctor"]) == 0
    assert "memory free" in capsys.readouterr().out
