"""Jobs that wait for memory: announced, started in their turn, and to the bit what they would have been alone."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muxtune.api import train as train_config
from muxtune.engine.engine import Engine
from muxtune.engine.local import LocalEngine
from muxtune.engine.optim import FlatAdamW
from muxtune.engine.room import Room
from muxtune.engine.training import TrainingRun
from muxtune.errors import AdapterError, CheckpointError, ConfigError, StateError
from muxtune.peft.parameters import FlatParameters
from muxtune.spec.event import RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.run import RunSpec
from tests.engine.build import backbone_of
from tests.engine.runs import (
    DIED,
    JOBS,
    STEPS,
    Trainer,
    assert_same_result,
    bits,
    job,
    newest_step,
    run_of,
    scratch,
    status,
    steps_of,
    stop_after,
    told,
    train,
)

PROCESS = 2**28


@dataclass(frozen=True, slots=True)
class Limited:
    """Runs whose memory suffices for the first `count` of the jobs together, or for any alone if that is more."""

    model: Path
    output: Path
    cache: Path

    def run(self, jobs: list[JobSpec], count: int, **keys: Any) -> RunSpec:
        whole = run_of(self.model, self.output, jobs)
        planner = TrainingRun(whole, cache_dir=self.cache, overwrite=True, keep_going=True)
        base = planner.base()
        found = planner.admit(planner.prepare(planner.plan()[0], base)[0], base)
        room = Room(found.model, 0, PROCESS)
        groups = [found.sizes[:count], *((size,) for size in found.sizes)]
        limit = max(-room.left_bytes(group) + max(size.activation_bytes for size in group) for group in groups)
        return whole.model_copy(update={"memory_limit": limit, **keys})


@pytest.fixture(autouse=True)
def _as_much_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device: (PROCESS, 10**15))


@pytest.fixture
def limited(tiny_llama: Path, disk: Path, cache: Path) -> Limited:
    return Limited(tiny_llama, disk / "run", cache)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, data: Path, cache: Path) -> Iterator[Path]:
    """The output folder of a run of JOBS with memory for all of them."""
    with scratch() as folder:
        train(run_of(tiny_llama, folder, [job(data, name) for name in JOBS]), cache_dir=cache)
        yield folder


@pytest.fixture
def all_jobs(data: Path) -> list[JobSpec]:
    return [job(data, name) for name in JOBS]


def place(events: list[RunEvent], kind: str, task: str) -> int:
    """Where in the run the last such event of a task is."""
    places = [
        number
        for number, event in enumerate(events)
        if isinstance(event, TaskEvent) and (event.kind, event.task) == (kind, task)
    ]
    return places[-1]


def waiting_of(events: list[RunEvent]) -> dict[str, TaskEvent]:
    found = [event for event in events if isinstance(event, TaskEvent) and event.data.get("waiting")]
    return {event.task: event for event in found}


@pytest.mark.parametrize(("count", "waiting"), [(3, []), (2, ["text"]), (1, ["chat", "text"])])
def test_who_waits_ends_as_if_alone(
    count: int,
    waiting: list[str],
    limited: Limited,
    all_jobs: list[JobSpec],
    cache: Path,
    disk: Path,
    undisturbed: Path,
) -> None:
    events = train(limited.run(all_jobs, count), cache_dir=cache)
    assert list(waiting_of(events)) == waiting
    for name, total in STEPS.items():
        assert steps_of(events, name) == list(range(1, total + 1))
        assert told(events, name) == ["started", "completed"]
        one, other = disk / "run" / name, undisturbed / name
        if name in waiting:
            lines = (one / "events.jsonl").read_text().splitlines()
            assert [json.loads(line)["kind"] for line in lines][:3] == ["queued", "queued", "started"]
        assert_same_result(one, other)
    for before, after in zip(list(STEPS)[: len(waiting)], waiting, strict=False):
        ended, began = place(events, "completed", before), place(events, "started", after)
        assert ended < began and not [one for one in events[ended:began] if isinstance(one, StepResult)]


def test_what_is_said_of_who_waits(limited: Limited, all_jobs: list[JobSpec], cache: Path) -> None:
    events = train(limited.run(all_jobs, 1), cache_dir=cache, stop=lambda: True)
    chat, text = waiting_of(events).values()
    assert chat.kind == "queued" and chat.step == 0 and chat.data["total_steps"] == STEPS["chat"]
    assert chat.message.startswith("waits for memory: its adapter (") and chat.message.count(" MB") >= 3
    assert "and 1 adapter (" in chat.message and "in line" not in chat.message
    assert text.message.endswith("; chat is next in line")


def test_the_others_do_not_stall(limited: Limited, data: Path, cache: Path) -> None:
    """Whoever runs takes a step in every round, that in which another starts included."""
    jobs = [job(data, "long", like="sql", max_steps=9)]
    jobs += [job(data, f"short-{number}", like="sql", max_steps=3) for number in range(3)]
    events = train(limited.run(jobs, 2), cache_dir=cache)
    assert list(waiting_of(events)) == ["short-1", "short-2"]
    steps = [event for event in events if isinstance(event, StepResult)]
    together = [(steps[place].task, steps[place + 1].task) for place in range(0, len(steps), 2)]
    assert together == [("long", f"short-{number // 3}") for number in range(9)]


def test_stopped_while_some_wait_and_resumed(
    limited: Limited, all_jobs: list[JobSpec], cache: Path, disk: Path, undisturbed: Path
) -> None:
    """Who never started is there, is not written over, and starts; under whatever limit it is resumed."""
    run = limited.run(all_jobs, 1)
    first = train(run, cache_dir=cache, stop=stop_after(2))
    assert {name: steps_of(first, name) for name in JOBS} == {"sql": [1, 2], "chat": [], "text": []}
    for name in JOBS:
        assert status(disk / "run" / name) == "queued" and (disk / "run" / name / "job.json").exists()
        assert newest_step(disk / "run" / name) == (2 if name == "sql" else 0)
    with pytest.raises(StateError, match="holds a run already"):
        train(run, cache_dir=cache)
    second = train(run, cache_dir=cache, resume=True, stop=stop_after(11))
    assert told(second, "sql") == ["resumed", "completed"] and steps_of(second, "chat") == [1]
    assert list(waiting_of(second)) == ["chat", "text"]
    third = train(run.model_copy(update={"memory_limit": None}), cache_dir=cache, resume=True)
    assert not waiting_of(third) and told(third, "chat") == ["resumed", "completed"]
    assert told(third, "text") == ["started", "completed"]
    for name in JOBS:
        assert bits(disk / "run" / name) == bits(undisturbed / name)


def test_one_that_goes_on_may_have_to_wait(
    limited: Limited, all_jobs: list[JobSpec], cache: Path, disk: Path, undisturbed: Path
) -> None:
    train(run_of(limited.model, limited.output, all_jobs), cache_dir=cache, stop=stop_after(5))
    events = train(limited.run(all_jobs, 1), cache_dir=cache, resume=True)
    waiting = waiting_of(events)
    assert {name: event.step for name, event in waiting.items()} == {"chat": 5, "text": 5}
    assert waiting["chat"].data["loss"] and told(events, "chat") == ["resumed", "completed"]
    for name, total in STEPS.items():
        assert steps_of(events, name) == list(range(6, total + 1))
        assert bits(disk / "run" / name) == bits(undisturbed / name)


def test_many_that_can_never_fit_are_refused_as_nobodys_own(
    limited: Limited, all_jobs: list[JobSpec], cache: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^jobs: 3 of 3 jobs do not fit into memory, not even alone"):
        train(run_of(limited.model, limited.output, all_jobs, memory_limit=10**6), cache_dir=cache)


def test_overwrite_leaves_nothing_of_who_waits(limited: Limited, all_jobs: list[JobSpec], cache: Path) -> None:
    train(run_of(limited.model, limited.output, all_jobs), cache_dir=cache)
    train(limited.run(all_jobs, 1), cache_dir=cache, overwrite=True, stop=stop_after(1))
    left = {path.name for path in (limited.output / "text").iterdir()}
    assert left == {"job.json", "status.json", "events.jsonl"} and status(limited.output / "text") == "queued"


def test_who_fails_leaves_its_place(limited: Limited, data: Path, cache: Path, disk: Path, undisturbed: Path) -> None:
    wild = job(data, "wild", like="sql", learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0)
    events = train(limited.run([wild, job(data, "sql")], 1), cache_dir=cache)
    assert told(events, "wild") == ["started", "failed"]
    assert place(events, "failed", "wild") < place(events, "started", "sql")
    assert_same_result(disk / "run/sql", undisturbed / "sql")
    assert status(disk / "run/wild") == "failed"


@pytest.fixture
def adapter(limited: Limited, data: Path, cache: Path, disk: Path) -> Path:
    """A finished adapter like that of "text"."""
    engine = LocalEngine(limited.model, cache_dir=cache)
    return engine.save(engine.attach(job(data, "text")), disk / "adapter")


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_bad_start_is_found_before_anything_trains(
    keep_going: bool, limited: Limited, data: Path, cache: Path, adapter: Path
) -> None:
    """Though the job waits, and its values are another adapter's, which only attaching shows."""
    bad = job(data, "bad", like="text", peft={"r": 2}, adapter_path=str(adapter))
    run = limited.run([job(data, "sql"), bad, job(data, "text")], 1)
    if not keep_going:
        with pytest.raises(AdapterError, match="another adapter than the job's"):
            train(run, cache_dir=cache)
        assert not list(limited.output.glob("*/"))
        return
    events = train(run, cache_dir=cache, keep_going=True)
    assert told(events, "bad") == ["failed"] and list(waiting_of(events)) == ["text"]
    assert place(events, "failed", "bad") < place(events, "started", "sql") < place(events, "completed", "text")
    assert not (limited.output / "bad").exists()


def test_a_damaged_checkpoint_is_found_before_anything_trains(
    limited: Limited, all_jobs: list[JobSpec], cache: Path
) -> None:
    run = limited.run(all_jobs, 1)
    train(run.model_copy(update={"memory_limit": None}), cache_dir=cache, stop=stop_after(2))
    for manifest in (limited.output / "text").glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        train(run, cache_dir=cache, resume=True)
    assert newest_step(limited.output / "sql") == 2
    events = train(run, cache_dir=cache, resume=True, keep_going=True)
    assert told(events, "text") == ["failed"] and told(events, "chat") == ["resumed", "completed"]


def test_what_changes_while_it_waits_fails_alone(
    limited: Limited, data: Path, cache: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not be the run that was asked for: its start has other values than when the run began."""
    jobs = [job(data, "sql"), job(data, "from", like="text", adapter_path=str(adapter)), job(data, "chat")]
    other = LocalEngine(limited.model, cache_dir=cache)
    changed = other.attach(job(data, "text", seed=3))

    def change(event: RunEvent) -> None:
        if isinstance(event, StepResult) and (event.task, event.step) == ("sql", 1):
            other.save(changed, adapter, overwrite=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    seen: list[RunEvent] = []
    found = train_config(limited.run(jobs, 1), on_event=lambda event: (seen.append(event), change(event))[0])
    assert {name: one.status for name, one in found.items()} == {
        "sql": "completed",
        "from": "failed",
        "chat": "completed",
    }
    (failed,) = [event for event in seen if isinstance(event, TaskEvent) and event.kind == "failed"]
    assert failed.task == "from" and "has changed while it waited" in failed.message
    assert status(limited.output / "from") == "failed"


def test_an_exception_as_it_starts_fails_it_alone(
    limited: Limited, all_jobs: list[JobSpec], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, asked = LocalEngine.attach, list[str]()

    def starved(self: LocalEngine, spec: JobSpec, *arguments: Any, **keys: Any) -> Any:
        asked.append(spec.name)
        if asked[-1:] == ["chat"] and asked.count("chat") == 2:  # the first time was to see whether it could be
            raise RuntimeError("not enough memory")
        return attach(self, spec, *arguments, **keys)

    monkeypatch.setattr(LocalEngine, "attach", starved)
    events = train(limited.run(all_jobs, 1), cache_dir=cache)
    assert told(events, "chat") == ["failed"] and status(limited.output / "chat") == "failed"
    (failed,) = [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]
    assert failed.data["code"] == "exception" and "not enough memory" in failed.message
    assert told(events, "sql") == told(events, "text") == ["started", "completed"]


def test_equal_adapters_are_tried_once(
    limited: Limited, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PiSSA's start costs seconds: a sweep of it that waits does not pay twice."""
    attach, asked = LocalEngine.attach, list[str]()
    monkeypatch.setattr(
        LocalEngine, "attach", lambda self, spec, *a, **k: (asked.append(spec.name), attach(self, spec, *a, **k))[1]
    )
    jobs = [job(data, f"j{number}", like="sql", max_steps=1, seed=number) for number in range(3)]
    train(limited.run(jobs, 1), cache_dir=cache)
    assert asked == ["j0", "j1", "j2"]


def test_nothing_holds_a_task_that_has_ended_when_the_next_one_starts(
    limited: Limited, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its parameters nor its moments, and not until some collector comes by: the next one needs the memory.
    (That pages go back to the system: tests/peft/test_grouped.py.)"""
    made: list[weakref.ref[object]] = []
    trims: list[int] = []

    def watch(kind: Any) -> None:
        initial = kind.__init__

        def counted(self: object, *arguments: Any, **keys: Any) -> None:
            initial(self, *arguments, **keys)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", counted)

    wild = {"learning_rate": 1e30, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 9}
    jobs = [job(data, f"j{number}", like="chat", max_steps=3) for number in range(3)]
    jobs.insert(1, job(data, "wild", like="sql", **wild))
    run = limited.run(jobs, 1)
    for kind in (FlatParameters, FlatAdamW):
        watch(kind)
    trim = Engine.trim
    monkeypatch.setattr(Engine, "trim", lambda self: (trims.append(len(self.tasks)), trim(self))[1])
    alive: list[int] = []
    gc.disable()
    try:
        for event in TrainingRun(run, cache_dir=cache).events():
            if isinstance(event, TaskEvent) and event.kind == "started":
                alive.append(sum(one() is not None for one in made))
    finally:
        gc.enable()
    assert alive == [2] * 4 and trims == [0] * 3
    assert [status(limited.output / one.name) for one in jobs] == ["completed", "failed", "completed", "completed"]


def test_rows_that_failed_stay_too_many() -> None:
    engine = Engine(backbone_of(layers=1), fuse_tokens=100)
    engine.fuse_up_to(300)
    assert engine.fuse_tokens == 300
    engine.fuse_below(200)
    assert engine.fuse_tokens == 100
    engine.fuse_up_to(300)
    assert engine.fuse_tokens == 100
    engine.fuse_up_to(40)
    assert engine.fuse_tokens == 40


def test_a_pass_takes_what_the_present_tasks_leave(
    limited: Limited, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that may come together follow who is there."""
    bounds: list[int] = []
    fuse_up_to = Engine.fuse_up_to
    monkeypatch.setattr(Engine, "fuse_up_to", lambda self, rows: (bounds.append(rows), fuse_up_to(self, rows))[1])
    wide = job(data, "wide", like="sql", max_steps=2, peft={"r": 256})
    slim = job(data, "slim", like="sql", max_steps=2, peft={"r": 1, "target_modules": ["q_proj"]})
    train(limited.run([wide, slim.model_copy(update={"name": "slimmer"}), slim], 1), cache_dir=cache)
    first, *later = bounds
    assert later and max(later) > first


# The process dies before that operation.
MOMENTS = {
    "before the folder of one that waits": ("os.rename", r"/text/\.job\.json", 1),
    "while others wait": ("os.rename", r"sql/checkpoints/\.step-00000008", 1),
    "as the next one opens": ("open", r"chat/\.status\.json", 2),
    "as the next one starts": ("open", r"chat/\.status\.json", 3),
    "as the last one starts": ("os.rename", r"text/\.status\.json", 3),
}


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if "next one starts" in name else pytest.mark.full) for name in MOMENTS]
)
def test_killed(
    moment: str, limited: Limited, all_jobs: list[JobSpec], trainer: Trainer, disk: Path, undisturbed: Path
) -> None:
    operation, path, nth = MOMENTS[moment]
    run = limited.run(all_jobs, 1)
    killed = trainer.run(run, operation=operation, path=path, nth=nth, process_bytes=PROCESS)
    assert killed.code == DIED
    begun = {name: newest_step(disk / "run" / name) for name in JOBS}
    ended = trainer.run(run, resume=True, process_bytes=PROCESS)
    assert (ended.code, ended.error) == (0, "")
    for name, total in STEPS.items():
        assert len(ended.steps.get(name, ())) == total - begun[name]
        assert_same_result(disk / "run" / name, undisturbed / name)
