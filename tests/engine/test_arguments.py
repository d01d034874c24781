"""Wrong kinds of things and wrong places from Python: an error that names the argument, and nothing is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import muxtune
from muxtune.engine.training import TrainingRun
from muxtune.errors import AdapterError, MuxTuneError
from muxtune.peft.folder import read_config
from muxtune.spec.job import JobSpec
from tests.engine.runs import run_of, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def _job(data: Path, name: str = "sql", **keys: Any) -> JobSpec:
    return muxtune.Job(name=name, datasets=[str(data / "sql.jsonl")], max_steps=1, **keys)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, data: Path) -> muxtune.Engine:
    found = muxtune.Engine(tiny_llama, threads=1)
    found.attach(_job(data))
    return found


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a number to answer": (lambda e: e.sample(5, task="sql"), "prompt: should be text"),
    "bytes to answer": (lambda e: e.sample(b"hi", task="sql"), "prompt: should be text"),
    "turns as dicts": (lambda e: e.sample([{"role": "user", "content": "hi"}]), "muxtune.Message"),
    "no turns": (lambda e: e.sample([], task="sql"), "prompt: should be text"),
    "a task that is none": (lambda e: e.sample("hi", task=5), "5: no such task"),
    "nothing to go on": (lambda e: e.sample("", task="sql"), "prompt"),
    "a long prompt": (lambda e: e.sample("many words " * 300, task="sql"), "there is room for 255 and a reply"),
    "tokens in words": (lambda e: e.sample("hi", max_new_tokens="5"), "max_new_tokens: should be a whole number"),
    "no tokens": (lambda e: e.sample("hi", max_new_tokens=0), "max_new_tokens: must be at least 1"),
    "heat in words": (lambda e: e.sample("hi", temperature="hot"), "temperature: should be a number"),
    "cold": (lambda e: e.sample("hi", temperature=-1), "temperature: must be a number from 0"),
    "no probability": (lambda e: e.sample("hi", top_p=2.0), "top_p: must be a number from 0 to 1"),
    "half a seed": (lambda e: e.sample("hi", seed=0.5), "seed: should be a whole number"),
    "requests without tasks": (lambda e: e.generate(["hi"]), "requests: should be a list of pairs"),
    "a job that is none": (lambda e: e.attach({"name": "a"}), "job: should be a muxtune.Job"),
    "a folder that is none": (lambda e: e.load(5), "folder: should be a path"),
    "nowhere": (lambda e: e.load("/nowhere"), "neither an adapter folder nor a run"),
    "no path": (lambda e: e.load("x" * 5000), "neither an adapter folder nor a run"),
    "no path to start from": (lambda _: read_config(Path("x" * 5000)), "no such folder"),
    "no place": (lambda e: e.save("sql", None), "folder: should be a path, not nothing"),
    "no task": (lambda e: e.detach(None), "None: no such task"),
    "no config": (lambda e: muxtune.train({"jobs": []}), "config: should be a path"),  # type: ignore[arg-type]
    "a device by its number": (
        lambda _: muxtune.Engine(Path("x"), device=5),
        "device: should be auto, cpu, cuda or cuda:N, got 5",
    ),  # type: ignore[arg-type]
    "more threads than there are": (
        lambda _: muxtune.Engine(Path("x"), threads=5000),
        "threads: must be at most 4096",
    ),
    "no such device": (lambda _: muxtune.Engine(Path("x"), device="gpu"), "device: should be auto, cpu, cuda or"),
    "no such dtype": (lambda _: muxtune.Engine(Path("x"), dtype="fp23"), "dtype: should be one of auto, fp32"),  # type: ignore[arg-type]
    "no model": (lambda e: muxtune.Engine(5), "base_model: should be a path"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_of_the_wrong_kind_is_named(case: str, engine: muxtune.Engine) -> None:
    call, told = WRONG[case]
    with pytest.raises(MuxTuneError) as caught:
        call(engine)
    assert told in str(caught.value)
    assert list(engine.tasks) == ["sql"]


def test_places_that_cannot_be_written(engine: muxtune.Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place, told in (
        (tmp_path / "file", "there is something already"),
        (tmp_path / "file/in", f"in: cannot be written: {tmp_path / 'file'} is a file"),
        (Path("/proc/adapter"), "/proc/adapter: cannot be written: "),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ):
        with pytest.raises(AdapterError) as caught:
            engine.save("sql", place)
        assert told in str(caught.value)
    with pytest.raises(AdapterError, match="cannot be written"):
        engine.save("sql", tmp_path / "file", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_what_is_there_is_replaced_only_where_asked(engine: muxtune.Engine, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(AdapterError, match="there is something already"):
        engine.save("sql", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert engine.save("sql", tmp_path / "out") == tmp_path / "out"
    weights = tmp_path / "out/adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"")
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(AdapterError, match="there is something already"):
        engine.save("sql", tmp_path / "out")
    engine.save("sql", tmp_path / "out", overwrite=True)
    assert weights.read_bytes() == whole and (tmp_path / "out/notes.txt").read_text() == "mine"


def test_training_starts_from_no_checkpoint_and_no_unfinished_run(
    engine: muxtune.Engine, tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    """They are named for what they are, and what is advised works."""
    for _ in TrainingRun(run_of(tiny_llama, tmp_path, [_job(data, "run")])).events():
        pass
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "job.json").write_bytes((tmp_path / "run/job.json").read_bytes())
    for path, told in ((checkpoint, "a checkpoint"), (unfinished, "a run that is not finished")):
        with pytest.raises(AdapterError, match=f"this is {told}, not an adapter folder") as caught:
            engine.attach(_job(data, "next", adapter_path=str(path)))
        assert f"muxtune export {path} --out DIR" in str(caught.value)
    task = engine.attach(_job(data, "next", adapter_path=str(tmp_path / "run")))
    engine.detach(task)
