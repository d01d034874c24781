"""`muxtune export`: the same adapter, in a folder of its own, merged, or judged by another server's rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from muxtune.cli.main import run
from tests.cli.exports import load, logits

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def test_the_adapter_alone(trained: Path, tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["export", str(trained / "sql"), "--out", str(tmp_path / "sql")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'sql'}\n"
    names = {file.name for file in (tmp_path / "sql").iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "training_manifest.json",
        "README.md",
        "tokenizer.json",
    } <= names
    assert not names & {"job.json", "metrics.jsonl", "events.jsonl", "checkpoints"}
    for name in names:
        assert (tmp_path / "sql" / name).read_bytes() == (trained / "sql" / name).read_bytes()
    assert PeftModel.from_pretrained(load(tiny_llama), tmp_path / "sql").peft_config["default"].r == 2
    assert run(["export", str(trained / "sql"), "--out", str(tmp_path / "sql")]) == 2
    assert "there is something already" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["sql", "chat/checkpoints/step-00000040"])
@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_place_that_cannot_be_written(form: str, source: str, trained: Path, tmp_path: Path, capsys: Capture) -> None:
    """The folder that was asked for is named, and none of the names that are used on the way."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file/out", Path("/proc/out"), tmp_path / ("x" * 300)):
        assert run(["export", str(trained / source), "--format", form, "--out", str(out)]) == 2
        told = capsys.readouterr().err
        assert f"error: {out}: cannot be written: " in told and "choose a folder" in told and "staged" not in told


def test_another_name_for_the_base(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["export", str(trained / "sql"), "--out", str(tmp_path / "named"), "--base-name"]
    assert run([*command, "/models/llama"]) == 2
    assert "cannot be the path" in capsys.readouterr().err and not (tmp_path / "named").exists()
    assert run([*command, "org/tiny"]) == 0
    config = json.loads((tmp_path / "named/adapter_config.json").read_text())
    manifest = json.loads((tmp_path / "named/training_manifest.json").read_text())
    assert config["base_model_name_or_path"] == manifest["base"]["name"] == "org/tiny"
    assert "org/tiny" in (tmp_path / "named/README.md").read_text()
    weights = [load_file(folder / "adapter_model.safetensors") for folder in (trained / "sql", tmp_path / "named")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_merged(trained: Path, tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["export", str(trained / "sql"), "--format", "merged", "--out", str(tmp_path / "merged")]
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "4 weights of " in out and "logits differ from base + adapter by" in out
    merged = logits(load(tmp_path / "merged"))
    adapted = logits(PeftModel.from_pretrained(load(tiny_llama), trained / "sql"))
    assert torch.allclose(merged, adapted, atol=1e-4) and not torch.allclose(
        merged, logits(load(tiny_llama)), atol=1e-2
    )


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_checkpoint(form: str, trained: Path, tmp_path: Path, capsys: Capture) -> None:
    """The last checkpoint is the finished adapter; the one before is another."""
    first, last = sorted((trained / "chat/checkpoints").iterdir())
    for path in (first, last):
        assert run(["export", str(path), "--format", form, "--out", str(tmp_path / path.name)]) == 0
        assert f"its checkpoint at step {int(path.name[5:])}" in capsys.readouterr().err
    file = "adapter_model.safetensors" if form == "peft" else "model.safetensors"
    early, late = (load_file(tmp_path / path.name / file) for path in (first, last))
    assert any(not torch.equal(early[name], late[name]) for name in early)
    if form == "peft":
        ours, theirs = tmp_path / last.name, trained / "chat"
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        manifests = [json.loads((folder / "training_manifest.json").read_text()) for folder in (ours, theirs)]
        assert manifests[0] == manifests[1]


def test_check_vllm(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["export", str(trained / "sql"), "--format", "peft", "--check", "vllm"]) == 0
    assert "--enable-lora" in capsys.readouterr().out
    assert run(["export", str(trained / "sql"), "--out", str(tmp_path / "dora"), "--check", "vllm"]) == 0
    config = tmp_path / "dora/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    model = ["--base-model", json.loads((trained / "sql/job.json").read_text())["base_model"]]
    capsys.readouterr()
    assert run(["export", str(tmp_path / "dora"), "--check", "vllm", *model]) == 1
    assert "vLLM: DoRA is not supported" in capsys.readouterr().out


def test_a_pickle_is_never_opened(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/tiny"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert run(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "a pickle, which can run any code" in capsys.readouterr().err
