"""`muxtune sample`: replies as the adapter's training data would have them, from any folder that holds a LoRA."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch

from muxtune.cli.main import run
from muxtune.engine.local import LocalEngine
from tests.cli.projects import TRAINED, rows, write_config
from tests.cli.shell import Shell
from tests.tiny import tiny_folder, tiny_model

Capture = pytest.CaptureFixture[str]
QUESTION = "Is 3 a number?"


def expected(model: Path, folder: Path, prompt: str, **options: float) -> str:
    """The reply that the engine gives, asked from Python."""
    engine = LocalEngine(str(model), threads=1)
    return engine.sample(prompt, task=engine.load(folder), **options)  # type: ignore[arg-type]


@pytest.fixture
def cut(trained: Path, tmp_path: Path) -> Path:
    """The run of `chat` as it was when it was stopped: checkpoints, and no adapter yet."""
    shutil.copytree(trained / "chat", tmp_path / "chat")
    for name in ("adapter_config.json", "adapter_model.safetensors", "training_manifest.json"):
        (tmp_path / "chat" / name).unlink()
    return tmp_path / "chat"


def test_what_was_learnt_and_where_it_ends(trained: Path, capsys: Capture, tmp_path: Path) -> None:
    """`yes` and nothing else: the end of the turn was learnt too, and ends the reply without being shown."""
    assert run(["sample", str(trained / "chat"), QUESTION]) == 0
    assert capsys.readouterr() == ("yes\n", "")
    moved = shutil.copytree(trained / "chat", tmp_path / "elsewhere")
    (moved / "job.json").unlink()  # as a folder that was given away
    assert run(["sample", str(moved), QUESTION]) == 2
    assert "llama" in capsys.readouterr().err, "it names a base model that is not here"


def test_options_reach_the_engine(trained: Path, tiny_llama: Path, capsys: Capture) -> None:
    options = {"max_new_tokens": 6, "temperature": 1.5, "top_p": 0.9, "seed": 3}
    told = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert run(["sample", str(trained / "sql"), "How many users ", *told, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reply"] == expected(tiny_llama, trained / "sql", "How many users ", **options)
    assert found["prompt"] == "How many users " and found["adapter"] == str(trained / "sql")


def test_compare(trained: Path, tiny_llama: Path, capsys: Capture) -> None:
    folders = [str(trained / "chat"), str(trained / "sql")]
    command = ["sample", "--compare", *folders, QUESTION, "--max-new-tokens", "5"]
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["replies"]
    engine = LocalEngine(str(tiny_llama), threads=1)
    bare = engine.sample(QUESTION, max_new_tokens=5)
    alone = [expected(tiny_llama, Path(folder), QUESTION, max_new_tokens=5) for folder in folders]
    assert [one["adapter"] for one in found] == [None, *folders]
    assert [one["reply"] for one in found] == [bare, *alone], "one batch answers as each alone"
    assert len({one["reply"] for one in found}) == 3
    assert run(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"base model:\n{bare}\n\n{folders[0]}:\nyes\n\n{folders[1]}:\n")


def test_the_shell_streams_to_a_pipe(shell: Shell, trained: Path) -> None:
    ended = shell.run("sample", "trained/chat", QUESTION, FORCE_COLOR="1")
    assert (ended.code, ended.out, ended.err) == (0, "yes\n", "")


def test_a_prompt_longer_than_any_path_is_a_prompt(trained: Path, capsys: Capture) -> None:
    assert run(["sample", str(trained / "chat"), "a" * 300, "--max-new-tokens", "1"]) in (0, 2)
    assert "File name too long" not in capsys.readouterr().err
    assert run(["sample", str(trained / "chat"), "say " * 1000]) == 2
    told = capsys.readouterr().err
    assert re.match(
        r"error: prompt: the prompt has [0-9]{4} tokens, there is room for 255 and a reply\n  shorten it", told
    )
    assert len(told) < 300, "the prompt is not told back"


def test_an_adapter_of_another_base(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tiny_folder(tmp_path / "other", "llama", seed=1)
    assert run(["sample", str(trained / "chat"), QUESTION, "--base-model", str(other)]) == 2
    assert "trained on other base weights" in capsys.readouterr().err


def test_a_folder_that_peft_wrote(tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """No manifest: the base model's chat template and stop tokens. rsLoRA's other scale counts."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny_model("llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "plain")
    assert run(["sample", str(tmp_path / "plain"), QUESTION]) == 2
    assert "--base-model" in capsys.readouterr().err
    command = ["sample", str(tmp_path / "plain"), QUESTION, "--base-model", str(tiny_llama), "--max-new-tokens", "8"]
    assert run([*command, "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)["reply"]
    engine = LocalEngine(str(tiny_llama), threads=1)
    ids = engine._request(None, QUESTION, 8).prompt_ids
    new = model.generate(torch.tensor([list(ids)]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    stops = engine._request(None, QUESTION, 8).stop_ids
    kept = new[: next((place for place, token in enumerate(new) if token in stops), len(new))]
    assert reply == engine._decode(kept)


def test_a_run_that_is_not_finished(
    cut: Path, trained: Path, capsys: Capture, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)  # the job's data are named from here
    assert run(["sample", str(cut), QUESTION]) == 0
    told = capsys.readouterr()
    assert told.out == "yes\n" and told.err == f"{cut} is not finished: this is its checkpoint at step 40\n"
    first, last = sorted((cut / "checkpoints").iterdir())
    for path, step in ((first, 38), (last, 40)):
        assert run(["sample", str(path), QUESTION, "--max-new-tokens", "3"]) == 0
        assert f"checkpoint at step {step}" in capsys.readouterr().err
    shutil.rmtree(cut / "checkpoints")
    assert run(["sample", str(cut), QUESTION]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_an_adapter_with_its_own_template(
    shell: Shell, project: Path, tiny_llama: Path, trained: Path, capsys: Capture
) -> None:
    """The folder's template shapes the prompt: without it the model would not know the question's form again."""
    (project / "data/own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    job = {**TRAINED["chat"], "chat_template": "data/own.jinja"}
    write_config(project / "own.yaml", tiny_llama, "own", {"own": job})
    assert shell.run("train", "own.yaml").code == 0
    template = (project / "own/own/chat_template.jinja").read_text()
    assert template == (project / "data/own.jinja").read_text()
    assert run(["sample", str(project / "own/own"), QUESTION]) == 0
    assert capsys.readouterr().out == "yes\n" == rows(project / "own/own", "samples.jsonl")[-1]["reply"] + "\n"
    engine = LocalEngine(str(tiny_llama), threads=1)
    task = engine.load(project / "own/own")
    assert engine._decode(engine._request(task, "Hi", 5).prompt_ids) == "user=Hiassistant="
