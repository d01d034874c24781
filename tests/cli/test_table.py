"""The live table: fits its screen whatever the run is, and says first what matters most."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from muxtune.cli.lines import line_of
from muxtune.cli.table import live_table
from muxtune.cli.terminal import duration
from muxtune.cli.view import Pace, RunView
from muxtune.spec.event import EvalResult, RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def view_of(count: int, clock: Clock, total: int = 100) -> RunView:
    view = RunView([JobSpec(name=f"job-{number:02d}", datasets=["a.jsonl"]) for number in range(count)], clock=clock)
    for name in view.tasks:
        view.hear(TaskEvent("queued", name, 0, data={"total_steps": total}))
    return view


def step(task: str, number: int, loss: float = 1.5) -> StepResult:
    return StepResult(task, number, loss, 2e-4, 0.5, 10, 30, 0.5, number / 10, 0.1)


def hear(view: RunView, *events: RunEvent) -> None:
    for event in events:
        view.hear(event)


def drawn(view: RunView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(live_table(view, width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def busy(count: int = 50) -> tuple[RunView, Clock]:
    """Three run, one has failed, two are done, the others wait."""
    clock = Clock()
    view = view_of(count, clock)
    running = [f"job-{number:02d}" for number in (7, 20, 49)]
    hear(view, *(TaskEvent("started", name, 0) for name in (*running, "job-01", "job-02", "job-03")))
    clock.now_s = 2.0
    hear(view, *(step(name, 1) for name in running), EvalResult("job-20", 1, 2.25, 0.5, 9))
    hear(view, TaskEvent("failed", "job-01", 3, "the loss is nan", {"code": "non_finite_loss"}))
    hear(view, *(TaskEvent("completed", name, 100, f"runs/{name}") for name in ("job-02", "job-03")))
    return view, clock


def test_fifty_jobs_fit_24_lines() -> None:
    view, _ = busy()
    lines = drawn(view)
    assert len(lines) == 24
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines[1:5]] == ["job-07", "job-20", "job-49", "job-01"]
    assert "failed" in lines[4] and "queued" in lines[5]
    assert lines[-2].startswith("50 jobs") and "3 running" in lines[-2]
    assert lines[-1] == "... 29 more: 27 queued, 2 done"


def test_what_waits_for_memory_is_waiting_until_it_starts() -> None:
    clock = Clock()
    view = view_of(3, clock)
    told = {"total_steps": 100, "waiting": True}
    hear(view, TaskEvent("queued", "job-02", 0, "waits for memory: ...", told), TaskEvent("started", "job-00", 0))
    assert [line.split()[-1] for line in drawn(view)[1:4]] == ["running", "queued", "waiting"]
    clock.now_s = 2.0
    hear(view, step("job-00", 1), step("job-00", 2))
    assert view.eta_s == 298.0, "of all, at a step a second"
    hear(view, TaskEvent("queued", "job-02", 0, data={"total_steps": 100}))
    assert not view.with_state("waiting")


def test_the_line_of_what_waits_says_why() -> None:
    view = view_of(1, Clock())
    event = TaskEvent("queued", "job-00", 0, "waits for memory: ...", {"total_steps": 100, "waiting": True})
    view.hear(event)
    assert line_of(event, view) == "job-00 queued, 100 steps: waits for memory: ..."


def test_a_row() -> None:
    view, _ = busy()
    headings, first = (re.split(r"\s+", line.strip()) for line in drawn(view, width=120)[:2])
    row = dict(zip(headings, first, strict=True))
    assert row == {
        "task": "job-07",
        "PEFT": "lora",
        "step": "1/100",
        "epoch": "0.1",
        "loss": "1.5000",
        "eval": "-",
        "lr": "2.0e-04",
        "tok/s": "15",
        "ETA": "3m18s",
        "state": "running",
    }
    assert "2.2500" in drawn(view, width=120)[2]
    totals = drawn(view, width=120)[-2]
    assert "206/5000" in totals and "45" in totals and "3m18s" in totals


@pytest.mark.parametrize("width", [20, 40, 60, 79, 200])
@pytest.mark.parametrize("height", [6, 24, 60])
def test_any_screen(width: int, height: int) -> None:
    view, _ = busy()
    view.note = "stopping at the end of this step; Ctrl-C again stops at once"
    lines = drawn(view, width, height)
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    assert "job-07" in lines[1] and "1/100" in lines[1]
    assert any(line.startswith("stopping") for line in lines)


def test_a_few_jobs_are_all_shown() -> None:
    view = view_of(3, Clock())
    assert len(drawn(view)) == 5
    assert drawn(view)[-1].startswith("3 jobs")


def test_a_long_name_is_cut_and_a_strange_one_is_not_markup() -> None:
    jobs = [JobSpec(name="x" * 60, datasets=["a.jsonl"])]
    lines = drawn(RunView(jobs))
    assert all(len(line) <= 80 for line in lines) and "\N{HORIZONTAL ELLIPSIS}" in lines[1]


def test_pace_looks_back_a_while_only() -> None:
    pace = Pace()
    assert pace.tokens_per_s is None
    pace.start(0)
    for second in range(1, 11):
        pace.add(second, 100)
    assert pace.tokens_per_s == 100 and pace.steps_per_s == 1
    for second in range(12, 62, 2):
        pace.add(second, 100)
    assert pace.tokens_per_s == 50


def test_lines_come_every_logging_steps_and_at_the_end() -> None:
    clock = Clock()
    view = RunView([JobSpec(name="sql", datasets=["a.jsonl"], logging_steps=10)], clock=clock)
    hear(view, TaskEvent("queued", "sql", 0, data={"total_steps": 25}), TaskEvent("started", "sql", 0))
    told = []
    for number in range(1, 26):
        clock.now_s += 1
        view.hear(step("sql", number))
        if line := line_of(step("sql", number), view):
            told.append(line)
    assert [line.split()[1] for line in told] == ["step=10/25", "step=20/25", "step=25/25"]
    assert told[0] == "sql step=10/25 epoch=1.00 loss=1.5000 lr=2.0e-04 grad_norm=0.50 tok/s=30"


def test_no_line_holds_a_sample() -> None:
    view = view_of(1, Clock())
    event = TaskEvent("sample", "job-00", 5, data={"prompt": "secret", "reply": "text"})
    view.hear(event)
    assert line_of(event, view) is None and view.tasks["job-00"].samples == [("secret", "text")]
    view.hear(TaskEvent("sample", "job-00", 9, data={"prompt": "secret", "reply": "newer"}))
    assert view.tasks["job-00"].samples == [("secret", "newer")]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
