"""Every PEFT type from the command line: one run of them all, continued, sampled from, exported, merged or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from muxtune.cli.main import run
from tests.cli.exports import load, logits
from tests.cli.projects import rows, status, write_config
from tests.cli.shell import Shell

Capture = pytest.CaptureFixture[str]

MERGEABLE = ("lora", "rslora", "dora", "pissa", "ia3", "ln_tuning", "shira")
BESIDE = {  # what is exported as an adapter only, and the word of the refusal to merge it
    "houlsby": "cannot be merged",
    "pfeiffer": "cannot be merged",
    "parallel": "cannot be merged",
    "prefix_tuning": "cannot be merged",
    "prompt_tuning": "cannot be merged",
    "bitfit": "bias",  # Llama's linears have none to change
}
TYPES = (*MERGEABLE, *BESIDE)
KNOWN_TO_PEFT = tuple(name for name in TYPES if name not in ("houlsby", "pfeiffer", "parallel"))
PROMPT = "How many users are above 40? "
of_peft = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # about types of its own


@pytest.fixture(scope="module")
def types_run(shell: Shell, project: Path, tiny_llama: Path) -> Path:
    """All types trained together at their own rates: two steps, and two more after --resume."""
    jobs = {
        name: {"datasets": [{"path": "data/sql.jsonl"}], "peft": {"type": name}, "learning_rate": None}
        for name in TYPES
    }
    for job in jobs.values():
        job |= {"lr_scheduler_type": "constant", "max_steps": 2}
    write_config(project / "types.yaml", tiny_llama, "types", jobs)
    first = shell.run("train", "types.yaml")
    assert first.code == 0, first.err
    again = shell.run("train", "types.yaml", "--resume", "--set", "max_steps=4")
    assert again.code == 0, again.err
    assert all(f"{name} resumed step=2/4" in again.err for name in TYPES)
    return project / "types"


@pytest.fixture(autouse=True)
def _in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def test_each_has_trained_all_its_steps_once(types_run: Path) -> None:
    for name in TYPES:
        steps = [row["train/global_step"] for row in rows(types_run / name) if "train/loss" in row]
        assert steps == [1, 2, 3, 4] and status(types_run / name) == "completed"


def test_one_batch_asks_them_all(types_run: Path, capsys: Capture) -> None:
    folders = [str(types_run / name) for name in TYPES]
    command = ["sample", "--compare", *folders, "--max-new-tokens", "4", "--json"]
    assert run([*command, PROMPT]) == 0
    replies = {row["adapter"]: row["reply"] for row in json.loads(capsys.readouterr().out)["replies"]}
    assert list(replies) == [None, *folders]
    for folder in (folders[0], folders[-1]):
        assert run(["sample", folder, "--max-new-tokens", "4", "--json", PROMPT]) == 0
        assert json.loads(capsys.readouterr().out)["reply"] == replies[folder]


@of_peft
@pytest.mark.parametrize("name", TYPES)
def test_exported(name: str, types_run: Path, tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """The folder is whole, and where peft has the type, peft loads it and its logits move."""
    out = tmp_path / name
    assert run(["export", str(types_run / name), "--format", "peft", "--out", str(out)]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["peft_type"]
    assert (out / "adapter_model.safetensors").is_file()
    if name in KNOWN_TO_PEFT:
        moved = logits(PeftModel.from_pretrained(load(tiny_llama), out))
        assert not torch.equal(moved, logits(load(tiny_llama)))


@of_peft
@pytest.mark.parametrize("name", MERGEABLE)
def test_merged(name: str, types_run: Path, tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / name
    assert run(["export", str(types_run / name), "--format", "merged", "--out", str(out)]) == 0
    assert "its logits differ from base + adapter by" in capsys.readouterr().out
    adapted = logits(PeftModel.from_pretrained(load(tiny_llama), types_run / name))
    assert torch.allclose(logits(load(out)), adapted, atol=1e-4)


@pytest.mark.parametrize("name", BESIDE)
def test_what_cannot_be_merged_is_refused(name: str, types_run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / name
    assert run(["export", str(types_run / name), "--format", "merged", "--out", str(out)]) == 2
    assert BESIDE[name] in capsys.readouterr().err and not out.exists()
