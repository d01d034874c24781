"""`muxtune train`, run as users run it: what it prints where, what it leaves, and how it ends."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from muxtune.cli.main import run
from muxtune.models.memory import footprint
from tests.cli.projects import ESCAPE, TRAINED, rows, status, write_config
from tests.cli.shell import Shell, Terminal
from tests.tiny import tiny_folder

STEP = re.compile(r"sql step=2/4 epoch=0\.67 loss=\d+\.\d{4} lr=1\.5e-02 grad_norm=\d+\.\d{2} tok/s=\d+")
ONE = {"sql": TRAINED["sql"]}


def test_a_run_in_a_pipe(shell: Shell, project: Path, tiny_llama: Path) -> None:
    jobs = {**ONE, "chat": {**TRAINED["chat"], "max_steps": 3}}
    write_config(project / "pipe.yaml", tiny_llama, "pipe", jobs)
    ended = shell.run("train", "pipe.yaml", FORCE_COLOR="1")
    assert ended.code == 0
    assert not ESCAPE.search(ended.out + ended.err)
    lines = ended.err.splitlines()
    assert any(STEP.fullmatch(line) for line in lines)
    assert "sql started step=0/4" in lines and "chat completed step=3/3: pipe/chat" in lines
    assert any(re.fullmatch(r"sql eval step=4/4 loss=\d\.\d{4} accuracy=0\.\d{3}", line) for line in lines)
    assert lines[-1] == "2 of 2 jobs completed"
    assert not any("Is 3 a number" in line for line in lines), "text of an example in the log"
    table, _, samples = ended.out.partition("\n\n")
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["sql", "completed", "4/4"],
        ["chat", "completed", "3/3"],
    ]
    assert samples.startswith("chat > Is 3 a number?\n")


def test_what_a_run_leaves(trained: Path) -> None:
    folder = trained / "sql"
    assert {row["train/global_step"] for row in rows(folder) if "train/loss" in row} == {1, 2, 3, 4}
    assert [row["train/global_step"] for row in rows(folder) if "eval/loss" in row] == [2, 4]
    with open(folder / "metrics.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 6
    assert status(folder) == "completed"
    assert (folder / "adapter_model.safetensors").exists()
    (sample,) = rows(trained / "chat", "samples.jsonl")
    assert sample["step"] == 40 and sample["prompt"] == "Is 3 a number?" and sample["reply"] == "yes"
    assert not (folder / "samples.jsonl").exists()


def test_a_folder_that_holds_a_run(shell: Shell, project: Path, tiny_llama: Path) -> None:
    write_config(project / "again.yaml", tiny_llama, "again", ONE)
    assert shell.run("train", "again.yaml").code == 0
    before = (project / "again/sql/adapter_model.safetensors").stat().st_mtime_ns
    refused = shell.run("train", "again.yaml")
    assert (refused.code, refused.out) == (2, "")
    assert (
        refused.err
        == "error: again/sql: this folder holds a run already\n  continue it with --resume, or --overwrite\n"
    )
    resumed = shell.run("train", "again.yaml", "--resume")
    assert resumed.code == 0 and "sql completed earlier: again/sql" in resumed.err
    assert (project / "again/sql/adapter_model.safetensors").stat().st_mtime_ns == before
    changed = shell.run("train", "again.yaml", "--resume", "--set", "learning_rate=1e-3")
    assert changed.code == 2 and "learning_rate: 0.02 -> 0.001" in changed.err
    started = shell.run("train", "again.yaml", "--overwrite", "--set", "jobs.sql.max_steps=2")
    assert started.code == 0
    assert {row["train/global_step"] for row in rows(project / "again/sql")} == {1, 2}


def test_one_job_fails_the_others_complete(shell: Shell, project: Path, tiny_llama: Path) -> None:
    jobs = {**ONE, "wild": {"datasets": ["data/sql.jsonl"], "learning_rate": 1e30}}
    write_config(project / "wild.yaml", tiny_llama, "wild", jobs)
    ended = shell.run("train", "wild.yaml")
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "1 of 2 jobs completed; failed: wild"
    assert re.search(r"wild failed at step \d: .*\[non_finite_\w+\]\n  lower its learning_rate", ended.err)
    assert re.search(r"^wild +failed .*\b(loss|gradient|weight)", ended.out, re.M)
    assert status(project / "wild/sql") == "completed" and status(project / "wild/wild") == "failed"


def test_one_bad_file(shell: Shell, project: Path, tiny_llama: Path) -> None:
    jobs = {**ONE, "bad": {"datasets": ["data/bad.jsonl"]}, "gone": {"datasets": ["data/gone.jsonl"]}}
    write_config(project / "bad.yaml", tiny_llama, "bad", jobs)
    refused = shell.run("train", "bad.yaml")
    assert refused.code == 2 and refused.out == ""
    assert "line 2: " in refused.err and "line 3: " in refused.err and "data/gone.jsonl" in refused.err
    assert not (project / "bad/sql").exists()
    kept = shell.run("train", "bad.yaml", "--keep-going")
    assert kept.code == 1 and kept.err.splitlines()[-1] == "1 of 3 jobs completed; failed: bad, gone"
    assert "line 2: " in kept.err and "Traceback" not in refused.err + kept.err


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"memory_limit": "1M"}, r"jobs\.sql: does not fit into memory: its longest batch \(\d+ tokens at once\)"),
        ({"memory_limit": "1M"}, r"of 1\.0 MB there are 0 B left beside the process \(\d+\.\d MB\), the base model"),
        ({"device": "cuda"}, r"device: there is no CUDA device here"),
        ({"base_model": "smollm2-135m-instrukt"}, r"there is no model 'smollm2-135m-instrukt'"),
    ],
)
def test_what_cannot_run_is_refused_first(
    keys: dict[str, str], told: str, shell: Shell, project: Path, tiny_llama: Path
) -> None:
    write_config(project / "no.yaml", tiny_llama, "no", ONE, **keys)
    ended = shell.run("train", "no.yaml")
    assert ended.code == 2 and re.search(told, ended.err) and "Traceback" not in ended.err
    assert not (project / "no/sql").exists()


def test_a_job_that_cannot_fit_may_fail_alone(shell: Shell, project: Path, tiny_llama: Path) -> None:
    """Its adapter is too large for the limit; said with the numbers, before a weight is loaded."""
    wide = {"datasets": ["data/sql.jsonl"], "peft": {"r": 65_536}}
    write_config(project / "wide.yaml", tiny_llama, "wide", {"wide": wide, **ONE}, memory_limit="1GB")
    refused = shell.run("train", "wide.yaml")
    assert refused.code == 2 and not (project / "wide/sql").exists()
    assert re.search(r"jobs\.wide: does not fit into memory: its .*of 1\.0 GB there are .*1 adapter ", refused.err)
    kept = shell.run("train", "wide.yaml", "--keep-going")
    assert kept.code == 1 and kept.err.splitlines()[-1] == "1 of 2 jobs completed; failed: wide"
    assert not (project / "wide/wide").exists() and status(project / "wide/sql") == "completed"


def test_an_unwritable_output(shell: Shell, project: Path, tiny_llama: Path) -> None:
    (project / "file").touch()
    write_config(project / "file.yaml", tiny_llama, "file/runs", ONE)
    ended = shell.run("train", "file.yaml")
    assert ended.code == 2 and "error: output_dir: cannot be written" in ended.err


def test_a_prompt_that_cannot_be_answered_costs_a_warning(shell: Shell, project: Path, tiny_llama: Path) -> None:
    jobs = {"sql": {**TRAINED["sql"], "sample_prompts": ["word " * 300]}}
    write_config(project / "long.yaml", tiny_llama, "long", jobs)
    ended = shell.run("train", "long.yaml")
    assert ended.code == 0 and "sql warning: sample_prompts: the prompt has" in ended.err
    assert not (project / "long/sql/samples.jsonl").exists()


def test_dry_run(shell: Shell, project: Path, tiny_llama: Path) -> None:
    write_config(
        project / "dry.yaml", tiny_llama, "dry", {**TRAINED, "long": {"datasets": ["data/sql.jsonl"], "max_length": 30}}
    )
    ended = shell.run("train", "dry.yaml", "--dry-run")
    assert ended.code == 0 and not (project / "dry").exists()
    assert ended.out.splitlines()[0].split() == [
        "job",
        "examples",
        "tokens",
        "trained",
        "longest",
        "steps",
        "parameters",
        "memory",
        "time",
    ]
    assert re.search(r"memory: about \d+\.\d MB of .*: base model \d+ kB, adapters \d+ kB", ended.out)
    assert (
        "long warning: 6 examples longer than 30 tokens, truncated: data/sql.jsonl lines 1, 2, 3, 4, 5, 6" in ended.err
    )
    found = json.loads(shell.run("train", "dry.yaml", "--dry-run", "--json").out)
    by_name = {job["name"]: job for job in found["jobs"]}
    sql = by_name["sql"]
    assert (sql["examples"], sql["steps"], sql["begins"]) == (6, 4, "new")
    # r 2 on q [48 -> 64] and v [48 -> 32] of two layers; 16 bytes each: value, gradient, two moments
    assert sql["parameters"] == 2 * 2 * ((48 + 64) + (48 + 32)) and sql["adapter_bytes"] == 16 * sql["parameters"]
    assert 0 < sql["trained_tokens"] < sql["tokens"] and by_name["long"]["longest"] == 30
    assert found["memory"]["peak_bytes"] < found["memory"]["limit_bytes"]


def test_a_dry_run_is_as_long_as_the_plan_says_where_operators_were_measured(
    shell: Shell, project: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    unheld = {name: {key: one[key] for key in one if key != "validation"} for name, one in TRAINED.items()}
    write_config(project / "eta.yaml", tiny_llama, "eta", unheld)
    own = {"XDG_CACHE_HOME": str(tmp_path)}
    guessed = json.loads(shell.run("train", "eta.yaml", "--dry-run", "--json", **own).out)
    assert guessed["time_from"] == "product" and guessed["time_s"] > 0
    assert "from a matrix product" in shell.run("train", "eta.yaml", "--dry-run", **own).out
    planned = json.loads(shell.run("plan", "eta.yaml", "--json", **own).out)
    found = json.loads(shell.run("train", "eta.yaml", "--dry-run", "--json", **own).out)
    assert found["time_from"] == "plan"
    assert found["time_s"] == pytest.approx(max(task["done_s"] for task in planned["tasks"]))
    shares = [[job["time_s"] / one["time_s"] for job in one["jobs"]] for one in (guessed, found)]
    assert shares[0] == pytest.approx(shares[1]) and sum(shares[1]) == pytest.approx(1)
    assert "predicted by the plan" in shell.run("train", "eta.yaml", "--dry-run", **own).out
    pairs = {"datasets": [{"path": "data/pairs.jsonl"}], "method": "dpo", "beta": 0.1}
    write_config(project / "pairs.yaml", tiny_llama, "pairs", {"pairs": pairs})
    alone = json.loads(shell.run("plan", "pairs.yaml", "--json", **own).out)["tasks"][0]["done_s"]
    compared = json.loads(shell.run("train", "pairs.yaml", "--dry-run", "--json", **own).out)["time_s"] - alone
    assert 0 < compared < alone / 2, "the bare backbone goes forward once, over all that trains"
    held_out = {**ONE["sql"], "validation": {"path": "data/sql.val.jsonl", "eval_steps": 1}}
    write_config(project / "held.yaml", tiny_llama, "held", {"sql": held_out})
    plan = json.loads(shell.run("plan", "held.yaml", "--json", **own).out)
    assert any("evaluations" in note for note in plan["notes"])
    run = json.loads(shell.run("train", "held.yaml", "--dry-run", "--json", **own).out)
    (task,) = plan["tasks"]
    assert task["done_s"] < run["time_s"] < 3 * task["done_s"], "each step is followed by a pass forward"


def test_dry_run_of_what_fits_only_with_recomputation(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so, to people and to programs."""
    monkeypatch.chdir(project)
    model = tiny_folder(tmp_path / "deep", "llama", layers=12)
    config = str(
        write_config(project / "deep.yaml", model, "deep", {"sql": {**ONE["sql"], "gradient_accumulation_steps": 50}})
    )
    needs = footprint(model, torch.float32)
    between = needs.recomputed().activation_bytes(255, 60) * 3 // 2  # its examples have so many tokens in all
    for free, recompute in ((10**9, False), (needs.weights_bytes + 500_000 + between, True)):
        monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device, free=free: (0, free))
        assert run(["train", config, "--dry-run"]) == 0
        assert ("tokens at once, computed twice to save memory)" in capsys.readouterr().out) == recompute
        assert run(["train", config, "--dry-run", "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        assert memory["recompute"] == recompute and memory["peak_bytes"] <= memory["limit_bytes"]


def test_dry_run_of_what_is_there(shell: Shell, trained: Path, project: Path) -> None:
    ended = shell.run("train", "trained.yaml", "--dry-run", "--resume", "--json")
    found = json.loads(ended.out)
    assert ended.code == 0 and found["finished"] == ["chat", "sql"] and found["jobs"] == []
    assert shell.run("train", "trained.yaml", "--dry-run").code == 2


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"adapter_path": "nowhere"}, r"error: refused\.yaml:\d+ jobs\.sql\.adapter_path: nowhere: no such folder"),
        (
            {"adapter_path": "."},
            r"error: refused\.yaml:\d+ jobs\.sql\.adapter_path: \.: adapter_config\.json is missing",
        ),
        ({"output_dir": "data/sql.jsonl"}, r"error: output_dir: cannot be written: data/sql\.jsonl: "),
        (
            {"output_dir": "data/sql.jsonl/x"},
            r"error: output_dir: cannot be written: data/sql\.jsonl/x: ",
        ),
        ({"output_dir": "/dev/null/x"}, r"error: output_dir: cannot be written: /dev/null/x: "),
        ({"output_dir": "/proc/x"}, r"error: output_dir: cannot be written: /proc/x: "),
    ],
)
def test_dry_run_refuses_what_training_refuses(
    keys: dict[str, str], told: str, project: Path, tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(project)
    run_keys = {key: value for key, value in keys.items() if key == "output_dir"}
    job = {"sql": {**TRAINED["sql"], **{key: value for key, value in keys.items() if key not in run_keys}}}
    config = "refused.yaml"
    write_config(project / config, tiny_llama, "refused", job, **run_keys)
    before = sorted(project.iterdir())
    for options in (["--dry-run"], []):
        assert run(["train", config, *options]) == 2
        assert re.match(told, capsys.readouterr().err), options
        assert not options or sorted(project.iterdir()) == before


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_checkpoint_to_start_from_is_told_what_it_is(
    options: list[str],
    trained: Path,
    project: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    (newest,) = sorted((trained / "sql/checkpoints").glob("step-*"))[-1:]
    write_config(project / "from.yaml", tiny_llama, "from", {"sql": {**TRAINED["sql"], "adapter_path": str(newest)}})
    assert run(["train", "from.yaml", *options]) == 2
    told = capsys.readouterr().err
    assert re.match(
        r"error: from\.yaml:\d+ jobs\.sql\.adapter_path: .*this is a checkpoint, not an adapter folder", told
    )
    assert f"muxtune export {newest} --out DIR" in told


def test_what_is_known_stays_in_the_table(
    trained: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of jobs that were completed earlier: step, loss and evaluation."""
    monkeypatch.chdir(project)
    assert run(["train", "trained.yaml", "--resume"]) == 0
    loss = rows(trained / "chat")[-1]["train/loss"]
    (chat,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("chat ")][:1]
    assert chat.split() == ["chat", "completed", "earlier", "40/40", f"{loss:.4f}", "-", "trained/chat"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"datasets": ["data/gone.jsonl"]}, "jobs.bad: data/gone.jsonl: no such file"),
        ({"datasets": ["data/bad.jsonl"]}, "jobs.bad: data/bad.jsonl: 2 bad lines"),
        ({"chat_template": "nope"}, "jobs.bad: nope: there is no such chat template"),
        ({"val_set_size": 6}, "jobs.bad.val_set_size: 6 of 6 examples held out"),
        ({"max_length": 100_000}, "jobs.bad.max_length: 100000 is more than"),
    ],
)
def test_the_error_of_one_bad_job_names_it(
    keys: dict[str, object], told: str, project: Path, tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(project)
    jobs = {"good": TRAINED["sql"], "bad": {**TRAINED["sql"], "validation": None, **keys}}
    config = "named.yaml"
    write_config(project / config, tiny_llama, "named", jobs)
    assert run(["train", config]) == 2
    pattern = rf"error: (named\.yaml:\d+ )?{re.escape(told)}"  # with its line, where a key of the file is at fault
    assert re.match(pattern, capsys.readouterr().err)
    assert run(["train", config, "--dry-run", "--keep-going"]) == 1
    assert re.search(pattern, capsys.readouterr().err)


def test_dry_run_of_damaged_checkpoints_lets_the_others_go_on(
    project: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    config = "torn.yaml"
    write_config(project / config, tiny_llama, "torn", {"sql": TRAINED["sql"], "other": ONE["sql"]})
    assert run(["train", config]) == 0
    for manifest in (project / "torn/sql").glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    (project / "torn/sql/status.json").write_text("")
    (project / "torn/other/adapter_config.json").unlink()
    capsys.readouterr()
    assert run(["train", config, "--resume", "--dry-run"]) == 2
    assert "torn/sql/checkpoints: every checkpoint is damaged" in capsys.readouterr().err
    assert run(["train", config, "--resume", "--dry-run", "--keep-going"]) == 1
    told = capsys.readouterr()
    assert "every checkpoint is damaged" in told.err and re.search(r"^other .* 4->4 ", told.out, re.M)
    assert "other warning: adapter_config.json is missing: it is made again from the newest checkpoint" in told.err


def test_the_table_on_a_terminal(shell: Shell, project: Path, tiny_llama: Path) -> None:
    write_config(project / "tty.yaml", tiny_llama, "tty", ONE)
    terminal = Terminal()
    ended = shell.start(["train", "tty.yaml", "--set", "max_steps=30"], terminal=terminal).wait()
    screen = terminal.read()
    terminal.close()
    assert ended.code == 0
    assert ESCAPE.search(screen) and "1 job" in screen and "1 running" in screen and "30/30" in screen
    assert "grad_norm=" not in screen


def test_a_terminal_without_colour(shell: Shell, project: Path, tiny_llama: Path) -> None:
    write_config(project / "mono.yaml", tiny_llama, "mono", ONE)
    terminal = Terminal()
    ended = shell.start(["train", "mono.yaml"], terminal=terminal, environment={"NO_COLOR": "1"}).wait()
    screen = terminal.read()
    terminal.close()
    assert ended.code == 0 and not ESCAPE.search(screen) and "sql step=4/4" in screen


def test_a_preference_job_beside_another(shell: Shell, project: Path, tiny_llama: Path) -> None:
    taste = {
        "method": "dpo",
        "datasets": ["data/pairs.jsonl"],
        "validation": {"path": "data/pairs.jsonl", "eval_steps": 6},
        "max_steps": 6,
    }
    write_config(project / "taste.yaml", tiny_llama, "taste", {**ONE, "taste": taste})
    planned = shell.run("train", "taste.yaml", "--dry-run", "--json")
    (one,) = [job for job in json.loads(planned.out)["jobs"] if job["name"] == "taste"]
    assert (planned.code, one["examples"], one["sequences"], one["steps"]) == (0, 6, 12, 6)
    ended = shell.run("train", "taste.yaml")
    assert ended.code == 0, ended.err
    assert re.search(r"^taste eval step=6/6 loss=0\.[0-6]\d{3} accuracy=1\.000$", ended.err, re.M)
    assert "taste completed step=6/6: taste/taste" in ended.err and "Is 3" not in ended.err
    with open(project / "taste/taste/metrics.csv", newline="") as file:
        margins = [float(row["train/rewards/margins"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(margins) == 6 and margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0.5
    again = shell.run("train", "taste.yaml", "--set", "jobs.taste.method=sft", "--overwrite")
    assert again.code == 2 and "are preference pairs, the method is sft" in again.err
