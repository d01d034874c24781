"""Runs over two ranks as users start them, and what becomes of them when a rank dies, hangs, or somebody stops them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.cli.projects import TRAINED, status, write_config
from tests.cli.ranks import RankedEnd, RankedRun, steps_of
from tests.cli.shell import Shell

STEPS = 40
JOBS = {
    "sql": {**TRAINED["sql"], "max_steps": STEPS, "validation": None, "save_steps": 4},
    "chat": {**TRAINED["chat"], "max_steps": STEPS, "peft": {"lora_dropout": 0.1}, "sample_prompts": ["Is 3?"]},
}
Start = Callable[..., RankedRun]


@pytest.fixture
def start(project: Path, environment: Mapping[str, str]) -> Iterator[Start]:
    runs: list[RankedRun] = []

    def starting(*arguments: str, launcher: Sequence[str] = (sys.executable, "-m")) -> RankedRun:
        runs.append(RankedRun(project, environment, arguments, launcher=launcher))
        return runs[-1]

    yield starting
    for run in runs:
        run.close()


@pytest.fixture(scope="module", params=["tp", pytest.param("pp", marks=pytest.mark.full)])
def degree(request: pytest.FixtureRequest) -> str:
    """Over what two ranks split the model."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def undisturbed(degree: str, project: Path, environment: Mapping[str, str], tiny_llama: Path) -> Path:
    """What JOBS come to on two ranks."""
    config, folder = _config(project, tiny_llama, f"undisturbed-{degree}")
    run = RankedRun(project, environment, [config, f"--{degree}", "2"])
    try:
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.err
    assert "2 of 2 jobs completed" in ended.err
    assert ("chat > Is 3?" in ended.out) == (degree == "tp")  # stages do not decode
    return folder


def _config(project: Path, model: Path, name: str) -> tuple[str, Path]:
    """Of this file alone: other files' tests run in the same folder, when the same process runs them."""
    name = f"ranks-{name}"
    write_config(project / f"{name}.yaml", model, name, JOBS, dtype="fp64")
    return f"{name}.yaml", project / name


def _assert_same(folder: Path, undisturbed: Path) -> None:
    """To the bit, and no step twice."""
    for name in JOBS:
        assert status(folder / name) == "completed"
        assert steps_of(folder / name) == list(range(1, STEPS + 1))
        ours, theirs = (run / name / "adapter_model.safetensors" for run in (folder, undisturbed))
        assert ours.read_bytes() == theirs.read_bytes()
        last = f"checkpoints/step-{STEPS:08d}/optimizer.safetensors"
        assert (folder / name / last).read_bytes() == (undisturbed / name / last).read_bytes()


def _assert_told(ended: RankedEnd, rank: int, told: str) -> None:
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert errors and errors[0].startswith(f"error: rank {rank}: ") and told in errors[0], ended.err
    assert len(errors) == 1 and ended.code == 1
    assert "--resume" in ended.err and "Traceback" not in ended.err


def test_killed_stopped_and_interrupted_it_comes_to_the_same_bits(
    degree: str, start: Start, project: Path, tiny_llama: Path, undisturbed: Path
) -> None:
    """One run, which goes on from its checkpoints after each of these."""
    config, folder = _config(project, tiny_llama, f"disturbed-{degree}")
    split = (config, f"--{degree}", "2")

    def begun(*arguments: str, steps: int) -> RankedRun:
        run = start(*split, *arguments)
        run.after_steps(folder / "sql", steps)
        return run

    run = begun(steps=5)
    run.ranks()[1].kill()
    ended = run.wait()
    assert ended.waited_s < 15
    _assert_told(ended, 1, "was killed (SIGKILL")
    assert "0 of 2 jobs completed" in ended.err

    run = begun("--resume", steps=9)
    run.ranks()[0].kill()
    ended = run.wait()
    assert ended.waited_s < 15
    _assert_told(ended, 0, "was killed (SIGKILL")

    run = begun("--resume", "--rank-timeout", "5", steps=13)
    run.ranks()[1].suspend()
    ended = run.wait()
    assert 4 < ended.waited_s < 30
    _assert_told(ended, 1, "no sign of life for 5 s")

    run = begun("--resume", steps=17)
    run.process.kill()
    run.process.wait()
    run.assert_gone()

    run = begun("--resume", steps=20)
    run.process.send_signal(signal.SIGINT)
    ended = run.wait()
    assert ended.code == 130 and "stopped; every task is saved" in ended.err
    assert f"Continue with: muxtune train {config} --set={degree}=2 --resume" in ended.err
    assert status(folder / "sql") == "queued"

    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m")
    ended = start(*split, "--resume", launcher=torchrun).wait()
    assert ended.code == 0, ended.err
    assert (folder / ".muxtune.ranks/1.log").exists()
    _assert_same(folder, undisturbed)


@pytest.mark.full
def test_a_stopped_first_rank_and_insisting(
    degree: str, start: Start, project: Path, tiny_llama: Path, undisturbed: Path
) -> None:
    config, folder = _config(project, tiny_llama, f"first-{degree}")
    split = (config, f"--{degree}", "2")
    run = start(*split, "--rank-timeout", "5")
    run.after_steps(folder / "sql", 5)
    run.ranks()[0].suspend()
    ended = run.wait()
    assert ended.waited_s < 30
    _assert_told(ended, 0, "no sign of life for 5 s")
    run = start(*split, "--resume")
    run.after_steps(folder / "sql", 9)
    for _ in range(2):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    ended = run.wait()
    assert ended.waited_s < 15 and ended.code == 130 and "Traceback" not in ended.err
    assert start(*split, "--resume").wait().code == 0
    _assert_same(folder, undisturbed)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_kills(
    seed: int, degree: str, start: Start, project: Path, tiny_llama: Path, undisturbed: Path
) -> None:
    """Ranks killed and stopped at random moments, the starter too, until the run is done: the same bits."""
    random_ = random.Random(seed)
    config, folder = _config(project, tiny_llama, f"storm-{seed}-{degree}")
    split = (config, f"--{degree}", "2")
    for _ in range(12):
        run = start(*split, "--rank-timeout", "4", *(["--resume"] if folder.exists() else []))
        time.sleep(random_.uniform(0.5, 9))
        victims: list[psutil.Process] = [*run.ranks().values(), psutil.Process(run.process.pid)]
        how = random_.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        victim = random_.choice(victims[: len(victims) - (how == signal.SIGSTOP)] or victims)
        if run.process.poll() is None and victim.pid != run.process.pid:
            victim.send_signal(how)
        elif run.process.poll() is None:
            run.process.kill()
        ended = run.wait(150)
        assert "Traceback" not in ended.err
        assert ended.code in (0, 1, -signal.SIGKILL), ended.err
    assert start(*split, "--resume").wait().code == 0
    _assert_same(folder, undisturbed)


def test_a_rank_that_differs_is_named(shell: Shell, project: Path, tiny_llama: Path) -> None:
    """Two machines, as it were, whose config is not the same: both end, before anything is trained."""
    config, folder = _config(project, tiny_llama, "differs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = []
    for rank, sets in enumerate(([], ["--set", "learning_rate=0.5"])):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(shell.start(["train", config, "--tp", "2", *sets], environment=place))
    first, second = (rank.wait() for rank in ranks)
    assert first.code == 1 and second.code == 1
    assert "error: rank 1: has another config than rank 0" in first.err and "Traceback" not in first.err
    assert not list(folder.rglob("adapter_model.safetensors"))


def test_a_rank_ends_without_taking_the_interpreter_down() -> None:
    """Which could abort it after all is done: threads of its group live as long as the process."""
    told = 'import atexit; atexit.register(print, "taken down"); from muxtune.cli.main import main; main({})'
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for environment, taken_down in ((place, False), ({}, True)):
        for arguments, code in ((["--version"], 0), (["train", "nowhere.yaml"], 2)):
            command = [sys.executable, "-c", told.format(arguments)]
            ended = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
            )
            assert ended.returncode == code and ("taken down" in ended.stdout) == taken_down, ended.stderr
            assert ("muxtune " in ended.stdout) if code == 0 else ("nowhere.yaml" in ended.stderr)


def test_what_does_not_go_together_is_said_before_anything_starts(
    shell: Shell, project: Path, tiny_llama: Path
) -> None:
    config, folder = _config(project, tiny_llama, "refused")
    refused = shell.run("train", config, "--tp", "20", "--pp", "200")
    assert refused.code == 2 and "tp, pp: 4000 ranks are too many for a machine with" in refused.err
    stages = shell.run("train", config, "--pp", "3", "--set", f"output_dir={folder}-stages")
    assert stages.code == 2 and "pp: 3 stages, but the model has 2 layers" in stages.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ended = shell.run("train", config, "--tp", "2", RANK="0", WORLD_SIZE="2", **address)
    assert ended.code == 1 and f"rank 0: port {address['MASTER_PORT']} is taken" in ended.err
    plan = shell.run("plan", config, "--set", "tp=2")
    assert plan.code == 2 and "tp: a plan for this machine is one for one process" in plan.err
    wrong = shell.run("train", config, "--tp", "3", RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost")
    assert wrong.code == 2 and "tp 3 x pp 1 are 3 ranks, and 2 have been started" in wrong.err
    assert not folder.exists()
    dry = shell.run("train", config, "--tp", "2", "--dry-run")
    assert dry.code == 0 and "memory of a rank: about" in dry.out and "estimated from a matrix product" in dry.out
