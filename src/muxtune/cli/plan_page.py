"""A plan as a picture: one HTML file that needs nothing else, to be opened, mailed or kept beside a run.

Tasks are rows and time goes to the right; the first lanes are the devices, whose idle time is drawn. Where the records
of a run are given, what they measured stands below the prediction, on the same scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from muxtune.cli.chart import Block, Chart, Kind, groups, legend, seconds_text, svg
from muxtune.cli.measured import measured_chart, train_rounds
from muxtune.cli.plan_report import Report, soon, tasks_text
from muxtune.cli.terminal import counted
from muxtune.durable import write_durably
from muxtune.engine.shortage import size_text
from muxtune.errors import ConfigError
from muxtune.plan.timeline import Event, Timeline
from muxtune.plan.types import RoundRecord

_KEYS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "pass": "pass, forward and backward",
    "carry": "forward only: piece of a long sequence",
    "eval": "evaluation",
    "step": "optimizer step",
    "collective": "collective between devices of a stage",
    "send": "activations or their gradient, between stages",
}
_MOST_TASKS = 64  # lanes; a picture of more says so
_MEASURED_ROUNDS = 1
_GENERATOR = b'<meta name="generator" content="muxtune plan">'
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Drawn:
    title: str
    legend: Markup
    told: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[str, ...]
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class _Table:
    """`text`: numbers of the columns, from 1 on, that hold text."""

    title: str
    lead: str
    headings: tuple[str, ...]
    rows: tuple[_Row, ...]
    text: frozenset[int] = frozenset({1})


def require_picture(text: str) -> None:
    """Raises ConfigError where `--html` names what no picture can be: no file, or a file that holds something else."""
    path, where = Path(text), f"--html {text or repr(text)}"
    if not text.strip() or text == "-":
        raise ConfigError("is no name of a file", where=where, hint="--html plan.html")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("cannot be written there", where=where, hint="name a file in a folder that exists")
    if path.exists() and not _is_picture(path):
        raise ConfigError("is there, and no picture of a plan", where=where, hint="choose another name, or remove it")


def _is_picture(path: Path) -> bool:
    """Whether a file may be replaced: it is one of ours, or empty."""
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return not head or _GENERATOR in head


def write_page(path: Path, report: Report, name: str, records: Sequence[RoundRecord] = ()) -> bool:
    """Write the picture, whole or not at all; whether something measured is in it. Raises ConfigError."""
    compared = train_rounds(records, _drawn_tasks(report), _MEASURED_ROUNDS)
    text = page(report, name, compared, recorded=bool(records))
    try:
        write_durably(path.resolve(), text.encode("utf-8", "replace"))  # a link stays one
    except OSError as error:
        told = f"cannot be written: {error.strerror}"
        raise ConfigError(told, where=f"--html {path}", hint="make room, or name a file in another folder") from None
    return bool(compared)


def page(report: Report, name: str, compared: Sequence[RoundRecord] = (), *, recorded: bool = False) -> str:
    """The HTML of a report on the config file `name`, beside what rounds of its run took; `recorded`: it has any."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("muxtune.cli") / "plan.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=f"Plan of {name}",
        lead=_lead(report),
        notes=_page_notes(report, missing=recorded and not compared),
        facts=list(_facts(report)),
        charts=_charts(report, compared),
        tables=list(_tables(report)),
        footer=_footer(report),
    )


def _lead(report: Report) -> str:
    table = report.forecast.table
    where = f"{table.device}, {table.dtype}, {counted(table.threads, 'thread')}"
    if report.on_cluster:
        where = (
            f"{report.cluster.devices} devices (tp {report.cluster.tp}, pp {report.cluster.pp}), measured on {where}"
        )
    return f"{table.model} on {where}. Times are predictions from an operator table, unless they are called measured."


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    outlook, plan = report.outlook, report.outlook.plan
    yield plan.policy, "policy"
    yield f"{tasks_text(report)}", f"in {counted(len(plan.htasks), 'hTask')}"
    yield seconds_text(outlook.iteration_s), "an iteration: one step of every task"
    yield f"{outlook.timeline.tokens_per_s:,.0f}", "tokens a second"
    who = "these" if report.waiting else "all"
    yield soon(max(outlook.done_s.values(), default=0.0)), f"until {who} tasks are done"
    yield size_text(plan.peak_bytes), "peak" + (f" of {size_text(plan.cap_bytes)}" if plan.cap_bytes else " memory")
    if report.cluster.devices > 1:
        yield f"{sum(outlook.timeline.utilisation) / plan.stages:.0%}", "of the devices' time computes"
        yield f"{outlook.timeline.bubble_share:.0%}", "idles (bubbles)"
        yield f"{outlook.timeline.stall_share:.0%}", "waits for collectives (stalls)"


def _charts(report: Report, compared: Sequence[RoundRecord]) -> list[_Drawn]:
    names, timeline = _drawn_tasks(report), report.outlook.timeline
    rounds = "one iteration"
    if timeline.iterations > 1:
        rounds = f"{timeline.iterations} iterations, one every {seconds_text(report.outlook.iteration_s)} on average"
    charts = [(predicted_chart(timeline, names, f"Predicted: {rounds}"), "hTask.pass")]
    if compared:
        first = compared[0].schedule.round
        took = sum(done.step is not None and done.step.task in names for done in compared[0].actions)
        part = f", in which {took} of these tasks took a step" if took < len(names) else ""
        chart = measured_chart(compared, names, f"Measured: round {first} of the run{part}")
        charts.append((chart, "rows in the lane of the device, a task's tokens in its own"))
    scale_s = max(chart.wall_s for chart, _ in charts)
    return [
        _Drawn(
            chart.title,
            legend(_used(chart), groups(chart), idle=bool(chart.idle)),
            f"Numbers in blocks: {told}.",
            svg(chart, scale_s=scale_s),
        )
        for chart, told in charts
    ]


def _drawn_tasks(report: Report) -> list[str]:
    return [name for htask in report.outlook.plan.htasks for name in htask.tasks][:_MOST_TASKS]


def _page_notes(report: Report, *, missing: bool) -> list[str]:
    """`missing`: there is a record, and nothing in it to compare with."""
    notes = list(report.notes)
    if (more := len(report.forecast.loads) - _MOST_TASKS) > 0:
        notes.append(f"{counted(more, 'more task')} have no lane of their own below")
    if missing:
        notes.append("no round of the recorded run trained any of these tasks: nothing measured is shown")
    return [f"{note[:1].upper()}{note[1:]}." for note in notes]


def _used(chart: Chart) -> list[tuple[Kind, str]]:
    kinds = {block.kind for block in chart.blocks}
    return [(kind, told) for kind, told in _KEYS.items() if kind in kinds]


def predicted_chart(timeline: Timeline, names: Sequence[str], title: str) -> Chart:
    """The devices of each stage and their links, then the tasks."""
    resources = sorted(
        {event.resource for event in timeline.events}, key=lambda one: (one.stage, one.kind != "compute")
    )
    single = len(resources) == 1
    lanes = ["device" if single else str(resource) for resource in resources]
    lane_of = {resource: lane for lane, resource in enumerate(resources)}
    task_lanes = {name: lane for lane, name in enumerate(names, len(lanes))}
    blocks: list[Block] = []
    for event in timeline.events:
        told = _told(event)
        kind = _kind(event)
        group, label = event.action.htask, f"{event.action.htask}.{event.action.chunk}"
        blocks.append(Block(lane_of[event.resource], event.start_s, event.end_s, kind, group, label, told))
        if event.resource.kind == "compute":
            for name in event.tasks:
                if name in task_lanes:
                    blocks.append(Block(task_lanes[name], event.start_s, event.end_s, kind, group, label, told))
    idle = frozenset(lane for resource, lane in lane_of.items() if resource.kind == "compute")
    return Chart(title, (*lanes, *names), tuple(blocks), timeline.wall_s, idle)


def _kind(event: Event) -> Kind:
    kinds: dict[str, Kind] = {"comm": "collective", "send": "send", "step": "step", "backward": "backward"}
    return kinds.get(event.what, "forward")


def _told(event: Event) -> str:
    took, action = seconds_text(event.end_s - event.start_s), event.action
    what = f"{event.what} of hTask {action.htask}, pass {action.chunk}, iteration {action.iteration}"
    return f"{what}: {took} ({', '.join(event.tasks)})"


def _tables(report: Report) -> Iterator[_Table]:
    yield _Table(
        "hTasks",
        "Tasks that share passes. An iteration: its passes and optimizer steps, one after another"
        + (" over all stages" * (report.cluster.pp > 1))
        + ". Saved: against its tasks one at a time. "
        + (
            "With the next: what an iteration would take more (+) or less (-) if the next hTask shared its passes too."
            if report.cluster.devices == 1
            else ""
        ),
        ("hTask", "rows of the largest pass", "passes", "an iteration", "saved", "with the next", "tasks"),
        tuple(
            _Row(
                (str(row.htask), f"{row.rows:,}", str(row.passes), seconds_text(row.s), row.saved, row.more, row.tasks)
            )
            for row in report.htasks
        ),
        frozenset({1, 7}),
    )
    if len(report.policies) > 1:
        yield _Table(
            "Policies",
            "The same tasks, predicted by the same model. x: the time of an iteration against the first.",
            (
                "policy",
                "hTasks",
                "passes",
                "s an iteration",
                "tokens/s",
                "x",
                "rows that are no token",
                "peak",
                "these done" if report.waiting else "all done",
            ),
            tuple(_Row(row.cells, place == 0) for place, row in enumerate(report.policies)),
        )
    yield _Table(
        "Tasks",
        "A typical optimizer step of each. Who runs with whom changes no task's result.",
        ("task", "rows a step", "chunks", "steps left", "adapter", "done after"),
        tuple(
            _Row((one.name, f"{one.rows:,}", str(one.chunks), f"{one.steps:,}", one.adapter, soon(one.done_s)))
            for one in report.tasks
        ),
        frozenset({1, 5}),
    )


def _footer(report: Report) -> str:
    return f"Planned in {1000 * report.planned_s:.0f} ms by MuxTune."
