"""What a run does with the folders it finds: never overwrites, skips, continues, starts, refuses - before it trains."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from muxtune.api import train as train_config
from muxtune.engine import runner
from muxtune.engine.engine import Engine
from muxtune.engine.local import LocalEngine
from muxtune.engine.profiler import measuring_bytes
from muxtune.engine.runner import Runner
from muxtune.engine.task_folder import read_origin
from muxtune.engine.trace_file import read_lines, read_traces
from muxtune.engine.training import TrainingRun
from muxtune.errors import AdapterError, CheckpointError, ConfigError, MuxTuneError, StateError, TaskError
from muxtune.models.cache import file_sha256
from muxtune.plan.types import Plan
from muxtune.spec.event import RunEvent, TaskEvent
from muxtune.spec.run import RunSpec
from muxtune.spec.status import JobStatus
from tests.engine.build import Trial, attach, backbone_of
from tests.engine.runs import (
    bits,
    job,
    losses_of,
    run_of,
    status,
    steps_of,
    stop_after,
    told,
    train,
    whole_checkpoints,
)
from tests.tiny import tiny_folder

Make = Callable[..., RunSpec]
SHORT: dict[str, Any] = {"like": "text", "max_steps": 3, "num_train_epochs": 1, "save_steps": 1}


@pytest.fixture
def make(tiny_llama: Path, disk: Path, data: Path) -> Make:
    """A run of short jobs, by name and with changes, into the test's own folder."""

    def make(jobs: dict[str, dict[str, Any]], **keys: Any) -> RunSpec:
        model = keys.pop("model", tiny_llama)
        return run_of(
            model, disk / "run", [job(data, name, **SHORT | changes) for name, changes in jobs.items()], **keys
        )

    return make


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files with their times of change: nothing was touched where this is equal."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_folder_that_holds_a_run_is_never_overwritten(make: Make, cache: Path, disk: Path) -> None:
    run = make({"a": {}})
    train(run, cache_dir=cache)
    before = everything(disk)
    with pytest.raises(StateError, match=r"holds a run already.*--resume") as caught:
        train(run, cache_dir=cache)
    assert caught.value.where == str(disk / "run/a")
    with pytest.raises(StateError):
        train(make({"new": {}, "a": {}}), cache_dir=cache)
    assert everything(disk) == before


@pytest.mark.parametrize("content", ["adapter_model.safetensors", "notes.txt"])
def test_nor_is_what_someone_else_put_there(content: str, make: Make, cache: Path, disk: Path) -> None:
    (disk / "run/a").mkdir(parents=True)
    (disk / "run/a" / content).write_text("mine")
    with pytest.raises(StateError, match="holds a run already"):
        train(make({"a": {}}), cache_dir=cache)
    with pytest.raises(CheckpointError, match="cannot read the job"):
        train(make({"a": {}}), cache_dir=cache, resume=True)
    assert (disk / "run/a" / content).read_text() == "mine"


def test_overwrite_leaves_nothing_of_the_old_run(make: Make, cache: Path, disk: Path) -> None:
    """Not even its checkpoints, which lie beyond the new run's steps and are whole."""
    train(make({"a": {"seed": 1, "max_steps": 9}}), cache_dir=cache)
    (disk / "run/a/stray").touch()
    events = train(make({"a": {"seed": 2}}), cache_dir=cache, overwrite=True)
    assert steps_of(events, "a") == [1, 2, 3] and whole_checkpoints(disk / "run/a") == [2, 3]
    again = bits(disk / "run/a")
    assert not (disk / "run/a/stray").exists()
    shutil.rmtree(disk / "run")
    train(make({"a": {"seed": 2}}), cache_dir=cache)
    assert bits(disk / "run/a") == again


def test_overwrite_starts_the_record_of_rounds_anew_unless_another_run_is_in_it(
    make: Make, cache: Path, disk: Path
) -> None:
    def rounds() -> list[int]:
        return [record.schedule.round for record in read_traces(disk / "run")]

    train(make({"a": {}, "b": {}}), cache_dir=cache)
    first = rounds()
    train(make({"a": {}, "b": {}}), cache_dir=cache, overwrite=True)
    assert rounds() == first != []
    train(make({"a": {}}), cache_dir=cache, overwrite=True)
    assert rounds()[: len(first)] == first and len(rounds()) > len(first), "of b, which is still there"
    before = rounds()
    train(make({"a": {}, "b": {}}), cache_dir=cache, resume=True)
    assert rounds() == before


def test_resume_skips_continues_and_starts(make: Make, cache: Path, disk: Path) -> None:
    jobs: dict[str, dict[str, Any]] = {"done": {"max_steps": 1}, "half": {}}
    train(make(jobs), cache_dir=cache, stop=stop_after(2))
    before = everything(disk / "run/done")
    events = train(make({**jobs, "new": {}}), cache_dir=cache, resume=True)
    assert [steps_of(events, name) for name in ("done", "half", "new")] == [[], [3], [1, 2, 3]]
    assert everything(disk / "run/done") == before
    finished = everything(disk / "run")
    assert told(train(make({**jobs, "new": {}}), cache_dir=cache, resume=True), "half") == ["completed"]
    assert everything(disk / "run") == finished


def test_a_finished_adapter_is_hashed_once(
    make: Make, cache: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run plans twice, before the base model is resolved and once nobody else can write; one file is one hash."""
    train(make({"a": {}, "b": {}}), cache_dir=cache)
    hashed: list[Path] = []
    monkeypatch.setattr("muxtune.engine.begin.file_sha256", lambda path: (hashed.append(path), file_sha256(path))[1])
    tensors = [disk / "run" / name / "adapter_model.safetensors" for name in "ab"]
    train(make({"a": {}, "b": {}}), cache_dir=cache, resume=True)
    assert hashed == tensors
    training = TrainingRun(make({"a": {}, "b": {}}), cache_dir=cache, resume=True)
    training.plan()
    whole = tensors[1].read_bytes()
    tensors[1].unlink()
    tensors[1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [plan.begin for plan in training.plan()[0]] == ["finished", "continue"], "another file is hashed again"


def test_a_job_keeps_when_it_was_created(make: Make, cache: Path, disk: Path) -> None:
    """Templates that ask for the date must get the same answer for as long as the job trains."""
    run = make({"a": {}})
    train(run, cache_dir=cache, stop=stop_after(1))
    created = read_origin(disk / "run/a").created
    train(run, cache_dir=cache, resume=True)
    assert read_origin(disk / "run/a").created == created


CHANGES = [
    ({"learning_rate": 1e-3}, "learning_rate: 0.01 -> 0.001"),
    ({"max_steps": 2}, "max_steps: 3 -> 2"),
    ({"peft": {"r": 2}}, "peft.r: 4 -> 2"),
    ({"seed": 5}, "seed: 42 -> 5"),
]


@pytest.mark.parametrize(("change", "difference"), CHANGES, ids=[difference for _, difference in CHANGES])
def test_a_changed_job_is_refused_and_nothing_is_touched(
    change: dict[str, Any], difference: str, make: Make, cache: Path, disk: Path
) -> None:
    train(make({"a": {}, "b": {}}), cache_dir=cache, stop=stop_after(1))
    before = everything(disk / "run")
    with pytest.raises(ConfigError) as caught:
        train(make({"new": {}, "a": {}, "b": change}), cache_dir=cache, resume=True)
    assert caught.value.where == "jobs.b" and difference in caught.value.message
    assert everything(disk / "run") == before


def test_a_schedule_that_depends_on_its_end_may_not_grow(make: Make, cache: Path) -> None:
    train(make({"a": {"lr_scheduler_type": "linear"}}), cache_dir=cache)
    with pytest.raises(ConfigError, match="max_steps: 3 -> 4"):
        train(make({"a": {"lr_scheduler_type": "linear", "max_steps": 4}}), cache_dir=cache, resume=True)


@pytest.mark.parametrize("finished", [True, False])
def test_other_base_weights_are_refused(finished: bool, make: Make, cache: Path, disk: Path, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", "llama", seed=1)
    train(make({"a": {}}), cache_dir=cache, stop=stop_after(9 if finished else 1))
    assert (status(disk / "run/a") == "completed") is finished
    before = everything(disk / "run")
    with pytest.raises(ConfigError, match="'a' was trained on other base weights") as caught:
        train(make({"a": {}}, model=other), cache_dir=cache, resume=True)
    assert caught.value.where == "base_model" and everything(disk / "run") == before


def test_another_dtype_is_refused(make: Make, cache: Path, disk: Path) -> None:
    train(make({"a": {}}), cache_dir=cache, stop=stop_after(1))
    before = everything(disk / "run")
    with pytest.raises(CheckpointError, match="float32 -> float64"):
        train(make({"a": {}}, dtype="fp64"), cache_dir=cache, resume=True)
    assert everything(disk / "run") == before


def test_changed_data_is_refused_and_moved_data_is_not(make: Make, data: Path, cache: Path, disk: Path) -> None:
    copy = Path(shutil.copy(data / "text.jsonl", disk / "moved.jsonl"))
    train(make({"a": {}}), cache_dir=cache, stop=stop_after(1))
    before = everything(disk / "run")
    copy.write_text(copy.read_text().replace("fox 3", "fox 4"))
    with pytest.raises(CheckpointError, match="the training data has changed"):
        train(make({"a": {"datasets": [copy]}}), cache_dir=cache, resume=True)
    assert everything(disk / "run") == before
    shutil.copy(data / "text.jsonl", copy)
    assert steps_of(train(make({"a": {"datasets": [copy]}}), cache_dir=cache, resume=True), "a") == [2, 3]


def damage_all(folder: Path) -> None:
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.unlink()


def test_a_run_without_a_whole_checkpoint_is_refused_before_anything_is_touched(
    make: Make, cache: Path, disk: Path
) -> None:
    run = make({"a": {}, "b": {}})
    train(run, cache_dir=cache, stop=stop_after(2))
    damage_all(disk / "run/b")
    before = everything(disk / "run")
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged: step-00000002: manifest\.json"):
        train(run, cache_dir=cache, resume=True)
    assert everything(disk / "run") == before
    events = train(run, cache_dir=cache, resume=True, keep_going=True)
    assert told(events, "b") == ["failed"] and steps_of(events, "a") == [3]
    assert {path: value for path, value in everything(disk / "run").items() if "/b/" in path} == {
        path: value for path, value in before.items() if "/b/" in path
    }


def test_the_api_tells_how_each_job_ended(make: Make, cache: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    empty = disk / "empty.jsonl"
    empty.touch()
    found = train_config(make({"a": {}, "bad": {"datasets": [empty]}}), keep_going=True)
    assert {name: result.status for name, result in found.items()} == {"a": "completed", "bad": "failed"}
    assert (found["a"].adapter_dir / "adapter_config.json").exists() and not found["bad"].adapter_dir.exists()


def test_the_lock_is_free_again_even_while_an_error_is_held(make: Make, cache: Path, disk: Path) -> None:
    empty = disk / "empty.jsonl"
    empty.touch()
    with pytest.raises(MuxTuneError) as held:
        train(make({"a": {"datasets": [empty]}}), cache_dir=cache)
    assert steps_of(train(make({"a": {}}), cache_dir=cache), "a") == [1, 2, 3]
    assert held.tb is not None


def test_a_run_in_this_process_holds_the_folder_too(make: Make, cache: Path) -> None:
    first = TrainingRun(make({"a": {}}), cache_dir=cache).events()
    assert next(first).kind in ("queued", "started")  # type: ignore[union-attr]
    with pytest.raises(StateError, match="another process"):
        train(make({"b": {}}), cache_dir=cache)
    first.close()  # type: ignore[attr-defined]
    train(make({"b": {}}), cache_dir=cache)


def test_an_output_folder_that_cannot_be_made(make: Make, cache: Path, disk: Path) -> None:
    (disk / "run").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        train(make({"a": {}}), cache_dir=cache)
    assert caught.value.where == "output_dir"


def test_what_a_killed_process_left_is_removed(make: Make, cache: Path, disk: Path) -> None:
    run = make({"a": {}})
    train(run, cache_dir=cache, stop=stop_after(1))
    left = [disk / "run/.a", disk / "run/a/checkpoints/.step-00000002", disk / "run/a/.status.json"]
    for path in left:
        staged = path.with_name(f"{path.name}.0123abcd.staged")
        staged.mkdir() if "json" not in path.name else staged.touch()
    train(run, cache_dir=cache, resume=True)
    assert not list((disk / "run").rglob("*.staged"))


def test_what_operators_cost_is_not_measured_where_memory_has_no_room_for_it(
    make: Make, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, notices = 2**28, list[str]()
    monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device: (process, 10**12))
    monkeypatch.setattr("muxtune.engine.local.kept_table", lambda *args, **more: pytest.fail("measures"))
    run = TrainingRun(make({"a": {}, "b": {}}), cache_dir=tmp_path)
    base = run.base()
    found = run.admit(run.prepare(run.plan()[0], base)[0], base)
    limit = process + found.model.weights_bytes + 2 * sum(size.alone_bytes for size in found.sizes)
    assert limit - process - found.model.weights_bytes < measuring_bytes(found.model)
    tight = make({"a": {}, "b": {}}, memory_limit=limit)
    list(TrainingRun(tight, cache_dir=tmp_path, notice=notices.append).events())
    assert status(disk / "run/a") == status(disk / "run/b") == "completed"
    assert any("memory has room for" in one and "`muxtune profile`" in one for one in notices)
    assert not [line for line in read_lines(disk / "run") if isinstance(line, Plan)]


def test_a_stated_limit_lowers_a_new_jobs_chunks_and_refuses_one_that_began_with_larger(
    make: Make, cache: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = 2**28
    monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device: (process, 10**12))

    def limited(rows: int, **options: Any) -> list[RunEvent]:
        size, model = sizes.sizes[0], sizes.model
        limit = process + model.weights_bytes + size.state_bytes + model.activation_bytes(rows, size.longest)
        return train(make({"a": {}}, memory_limit=limit), cache_dir=cache, **options)

    run = TrainingRun(make({"a": {}}), cache_dir=cache)
    base = run.base()
    sizes = run.admit(run.prepare(run.plan()[0], base)[0], base)
    assert sizes.sizes[0].widest > 64 > sizes.sizes[0].longest
    with pytest.raises(ConfigError, match="does not fit into memory: its longest batch"):
        limited(sizes.sizes[0].longest - 1)
    assert not (disk / "run/a").exists()
    events = limited(64, stop=stop_after(1))
    (warning,) = [event for event in events if isinstance(event, TaskEvent) and event.kind == "warning"]
    assert "chunks of 64 tokens, not 512" in warning.message
    (state,) = (disk / "run/a").glob("checkpoints/*/state.json")
    assert json.loads(state.read_text())["chunk_tokens"] == 64
    assert steps_of(train(make({"a": {}}), cache_dir=cache, resume=True), "a") == [2, 3], "its chunks are its own"
    train(make({"a": {}}), cache_dir=cache, overwrite=True, stop=stop_after(1))
    before = everything(disk / "run/a")
    with pytest.raises(ConfigError, match="has begun with chunks of 512 tokens"):
        limited(64, resume=True)
    assert everything(disk / "run/a") == before


def test_an_engine_of_ones_own_says_who_failed_when_the_others_are_done(make: Make, cache: Path) -> None:
    run = make({"good": {}, "wild": {"learning_rate": 1e30}})
    engine = LocalEngine(run.base_model, cache_dir=cache)
    good, wild = (engine.attach(run.job(name)) for name in ("good", "wild"))
    with pytest.raises(TaskError, match=r"failed: wild at step \d: the .* is"):
        list(engine.run())
    assert good.status is JobStatus.COMPLETED and wild.status is JobStatus.FAILED
    assert good.step == good.total_steps == 3 > wild.step


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("step_s", "saved"),
    [(1.0, [3, 6, 9]), (200.0, [3, 6, 9]), (350.0, [2, 3, 5, 6, 8, 9]), (700.0, [1, 2, 3, 4, 5, 6, 7, 8, 9])],
)
def test_saved_each_epoch_and_every_ten_minutes(step_s: float, saved: list[int]) -> None:
    assert runner.SAVE_EVERY_S == 600
    engine, clock = Engine(backbone_of(layers=1)), Clock()
    attach(engine, Trial("a", lengths=[5, 6, 7, 8, 9, 10], batch=2, steps=9))
    checkpoints: list[int] = []

    class Folder:
        def record(self, event: object) -> None:
            pass

        def checkpoint(self, task: Any) -> str:
            checkpoints.append(task.step)
            return ""

        def complete(self, task: Any) -> str:
            return ""

    run = Runner(engine, folders={"a": Folder()}, clock=clock).run()
    for event in run:
        if not isinstance(event, TaskEvent):
            clock.now_s += step_s
    assert checkpoints == saved


@pytest.fixture(scope="module")
def peft_adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that peft made and saved, of weights that matter."""
    folder = tmp_path_factory.mktemp("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


STARTED: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 2}


def test_training_starts_from_a_peft_folder(
    make: Make, tiny_llama: Path, cache: Path, disk: Path, peft_adapter: Path
) -> None:
    run = make({"a": {**STARTED, "adapter_path": str(peft_adapter)}, "fresh": STARTED})
    events = train(run, cache_dir=cache)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), peft_adapter)
    expected, fresh = peft_loss(model, run, cache), losses_of(events, "fresh")[0]
    assert losses_of(events, "a")[0] == pytest.approx(expected, rel=1e-5)
    assert abs(fresh - expected) > 1e-2, "the adapter must make a difference"
    with model.disable_adapter():
        assert fresh == pytest.approx(peft_loss(model, run, cache), rel=1e-5)


def peft_loss(model: torch.nn.Module, run: RunSpec, cache: Path) -> float:
    """Mean over the trained tokens of all examples, one example at a time."""
    engine = LocalEngine(run.base_model, cache_dir=cache)
    total, tokens = 0.0, 0
    for sequence in engine.attach(run.job("fresh")).data.train:
        ids = torch.from_numpy(sequence.ids.astype("int64"))[None]
        labels = torch.where(torch.from_numpy(sequence.mask.copy())[None], ids, -100)
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * sequence.trained_tokens
        tokens += sequence.trained_tokens
    return total / tokens


def test_a_start_that_has_changed_is_refused(make: Make, cache: Path, disk: Path, peft_adapter: Path) -> None:
    start = Path(shutil.copytree(peft_adapter, disk / "start"))
    run = make({"a": {**STARTED, "adapter_path": str(start)}})
    train(run, cache_dir=cache, stop=stop_after(1))
    before = everything(disk / "run")
    config = json.loads((start / "adapter_config.json").read_text())
    other = LocalEngine(run.base_model, cache_dir=cache)
    other.save(other.attach(run.job("a").model_copy(update={"adapter_path": None})), start, overwrite=True)
    assert json.loads((start / "adapter_config.json").read_text())["r"] == config["r"]
    with pytest.raises(CheckpointError, match="adapter_path has changed"):
        train(run, cache_dir=cache, resume=True)
    assert everything(disk / "run") == before
    shutil.rmtree(start)
    shutil.copytree(peft_adapter, start)
    assert steps_of(train(run, cache_dir=cache, resume=True), "a") == [2]


class Canary:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_to_start_from_is_refused(make: Make, cache: Path, disk: Path, peft_adapter: Path) -> None:
    start = Path(shutil.copytree(peft_adapter, disk / "start"))
    (start / "adapter_model.safetensors").unlink()
    (start / "adapter_model.bin").write_bytes(pickle.dumps(Canary(disk / "sings")))
    with pytest.raises(AdapterError, match="pickle"):
        train(make({"a": {**STARTED, "adapter_path": str(start)}}), cache_dir=cache)
    assert not (disk / "sings").exists() and not (disk / "run/a").exists()
