"""What `muxtune plan` has to say, as values: of the plan, of the policies beside it, of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muxtune.cli.chart import seconds_text
from muxtune.cli.terminal import counted, duration
from muxtune.engine.engine import DEFAULT_CHUNK_TOKENS
from muxtune.engine.shortage import size_text
from muxtune.plan.outlook import Outlook, Outlooks, cost_on
from muxtune.plan.planner import Reason, ineffective, reasons
from muxtune.spec.cluster import ClusterSpec
from muxtune.spec.policy import Policy

if TYPE_CHECKING:
    from muxtune.engine.forecast import Forecast


_SHOWN = 3  # names in one sentence


@dataclass(frozen=True, slots=True)
class HTaskRow:
    """One hTask: `saved` against its members one at a time, `more` what the next one in it would cost."""

    htask: int
    tasks: str
    rows: int
    passes: int
    s: float
    saved: str
    more: str


@dataclass(frozen=True, slots=True)
class PolicyRow:
    cells: tuple[str, ...]
    as_json: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TaskRow:
    name: str
    rows: int
    chunks: int
    steps: int
    adapter: str
    done_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """`planned_s`: what the plan took to make. `on_cluster`: whether it is for other hardware than this. `notes`:
    sentences on what the numbers leave out."""

    forecast: Forecast
    cluster: ClusterSpec
    on_cluster: bool
    outlook: Outlook
    planned_s: float
    reasons: tuple[Reason, ...]
    htasks: tuple[HTaskRow, ...]
    policies: tuple[PolicyRow, ...]
    tasks: tuple[TaskRow, ...]
    waiting: tuple[str, ...]
    notes: tuple[str, ...]


def make_report(
    forecast: Forecast,
    policies: Sequence[Policy],
    cluster: ClusterSpec,
    clock: Callable[[], float],
    on_cluster: bool,
) -> Report:
    """The first policy in full, and all of them compared. Raises ConfigError for what does not fit."""
    cost = cost_on(forecast.table, cluster, recompute=forecast.recompute)
    memory = replace(forecast.memory, cap_bytes=cluster.memory) if on_cluster else forecast.memory
    outlooks = Outlooks(forecast.loads, cost, memory, cluster, most_rows=None if on_cluster else forecast.most_rows)
    began_s = clock()
    outlook = outlooks.of(policies[0])
    planned_s = clock() - began_s
    # What fits several devices is the simulator's word, of a whole plan and not of two hTasks.
    whole = memory if cluster.devices == 1 else replace(memory, cap_bytes=None)
    why = reasons(outlook.plan, forecast.loads, cost, whole, most_rows=outlooks.most_rows)
    if cluster.devices > 1:  # there, fusing two more changes the pipeline and its buckets, which no sum tells
        why = [replace(one, more_s=None) for one in why]
    others = {policy: outlooks.of(policy) for policy in policies[1:]}
    compared = {policies[0]: outlook, **others}
    return Report(
        forecast,
        cluster,
        on_cluster,
        outlook,
        planned_s,
        tuple(why),
        tuple(_htask_row(outlook, reason) for reason in why),
        tuple(_policy_row(policy, one, outlook, outlooks) for policy, one in compared.items()),
        tuple(
            TaskRow(load.name, load.tokens, len(load.chunks), load.steps, load.adapter, outlook.done_s[load.name])
            for load in forecast.loads
        ),
        forecast.waiting,
        tuple(_notes(forecast, pipelined=cluster.devices > 1 and len(why) > 1)),
    )


def _notes(forecast: Forecast, *, pipelined: bool) -> Iterator[str]:
    if forecast.waiting:
        yield f"in none of these numbers, since they wait for memory: {_few(forecast.waiting)}"
    if forecast.recompute:
        yield "memory has no room for the activations of a pass: they are computed twice, which times and peak include"
    for tokens in sorted({tokens for _, tokens in forecast.smaller}):
        names = [name for name, own in forecast.smaller if own == tokens]
        yield f"memory_limit has room for chunks of {tokens} tokens, not {DEFAULT_CHUNK_TOKENS}: {_few(names)}"
    if forecast.evaluates:
        yield "times are those of training: evaluations, samples and saving come on top"
    if pipelined:
        yield "what fusing more would cost depends on the whole pipeline, so there is no number: see --policy all"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def soon(seconds: float) -> str:
    """As `duration`, finer below ten seconds."""
    return seconds_text(seconds) if seconds < 10 else duration(seconds)


def tasks_text(report: Report) -> str:
    """How many are planned, of how many there are."""
    planned, waiting = len(report.forecast.loads), len(report.waiting)
    return f"{planned:,} of {counted(planned + waiting, 'task')}" if waiting else counted(planned, "task")


def line(report: Report) -> str:
    """The plan in a line."""
    outlook, plan = report.outlook, report.outlook.plan
    tokens = sum(load.tokens for load in report.forecast.loads)
    parts = [
        f"{plan.policy}: {tasks_text(report)} in {counted(len(plan.htasks), 'hTask')}",
        f"{outlook.iteration_s:.3f} s an iteration of {tokens:,} tokens predicted",
        f"{outlook.timeline.tokens_per_s:,.0f} tokens/s",
        f"peak {size_text(plan.peak_bytes)}" + (f" of {size_text(plan.cap_bytes)}" if plan.cap_bytes else ""),
    ]
    if report.cluster.devices > 1:
        parts += [
            f"tp {report.cluster.tp} x pp {report.cluster.pp}",
            counted(len(plan.buckets), "bucket"),
            f"utilisation {sum(outlook.timeline.utilisation) / plan.stages:.0%}",
            f"bubbles {outlook.timeline.bubble_share:.0%}",
            f"stalls {outlook.timeline.stall_share:.0%}",
        ]
    return ", ".join([*parts, f"planned in {1000 * report.planned_s:.0f} ms"])


def _htask_row(outlook: Outlook, reason: Reason) -> HTaskRow:
    htask = outlook.plan.htasks[reason.htask]
    saved = f"{1 - reason.fused_s / reason.alone_s:.0%}" if len(htask.tasks) > 1 and reason.alone_s else "-"
    return HTaskRow(
        reason.htask, " ".join(htask.tasks), htask.rows, htask.passes, htask.predicted_s, saved, _more(reason)
    )


def _more(reason: Reason) -> str:
    if reason.more_s is None:
        return "-"
    if not reason.fits:
        if reason.short_bytes:
            return f"no: {size_text(reason.short_bytes)} of memory short"
        return f"no: {reason.more_rows:,} rows, at most {reason.most_rows:,}"
    return ("+" if reason.more_s >= 0 else "-") + seconds_text(abs(reason.more_s))


def _policy_row(policy: Policy, own: Outlook, first: Outlook, outlooks: Outlooks) -> PolicyRow:
    plan, unused = own.plan, ineffective(own.plan, outlooks.loads, outlooks.cost)
    passes, done_s = sum(htask.passes for htask in plan.htasks), max(own.done_s.values(), default=0.0)
    slower = own.iteration_s / first.iteration_s if first.iteration_s else 1.0
    cells = (
        policy,
        str(len(plan.htasks)),
        str(passes),
        f"{own.iteration_s:.3f}",
        f"{own.timeline.tokens_per_s:,.0f}",
        f"{slower:.2f}",
        f"{unused:.1%}",
        size_text(plan.peak_bytes),
        soon(done_s),
    )
    return PolicyRow(
        cells,
        {
            "policy": policy,
            "htasks": len(plan.htasks),
            "passes": passes,
            "iteration_s": own.iteration_s,
            "tokens_per_s": own.timeline.tokens_per_s,
            "slower": slower,
            "ineffective": unused,
            "peak_bytes": plan.peak_bytes,
            "done_s": done_s,
        },
    )
