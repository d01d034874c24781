"""`muxtune plan`: who would run with whom, what that should take, and why - before anything runs.

config -> forecast (loads, what operators cost here, memory) -> outlooks of policies -> tables, JSON or a picture
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.cli.terminal import console, grid, print_json, tell
from muxtune.cli.train import ConfigFile, Sets
from muxtune.errors import ConfigError, StateError

if TYPE_CHECKING:
    from muxtune.cli.plan_report import Report
    from muxtune.plan.types import RoundRecord
    from muxtune.spec.policy import Policy

PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="NAME", help="Another policy than the config's: muxtune, fuse-all, sequential, padded, all."
    ),
]
Cluster = Annotated[str | None, typer.Option("--cluster", metavar="FILE", help="Plan for the hardware in a YAML file.")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a picture as one HTML file.")]
Record = Annotated[
    str | None,
    typer.Option("--record", metavar="RUN", help="With --html: a run's output folder, to show what ran."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    config: ConfigFile,
    sets: Sets = None,
    policy: PolicyName = None,
    cluster: Cluster = None,
    html: Html = None,
    record: Record = None,
    as_json: Json = False,
) -> None:
    """Show the plan of a config file: which jobs are fused, what an iteration should take, and why. Trains nothing."""
    from muxtune.cli.plan_page import require_picture
    from muxtune.cli.plan_report import make_report
    from muxtune.spec.cluster import ClusterSpec, cluster_place, load_cluster
    from muxtune.spec.load import load_run

    resolved = load_run(config, sets or ())
    if record is not None and html is None:
        raise typer.BadParameter("--record belongs to --html")
    policies = _policies(policy, resolved.run.policy)
    if cluster is None and resolved.run.tp * resolved.run.pp > 1:
        raise ConfigError(
            "a plan for this machine is one for one process",
            where="tp" if resolved.run.tp > 1 else "pp",
            hint="--cluster FILE plans for several devices; --set tp=1 --set pp=1 for one",
        )
    spec = load_cluster(cluster) if cluster is not None else ClusterSpec()
    records = _records(record) if record is not None else ()
    if html is not None:
        require_picture(html)
    from muxtune.engine.forecast import forecast
    from muxtune.engine.training import TrainingRun

    training = TrainingRun(resolved.run, locate=resolved.locate)
    found = forecast(training, lambda text: tell(text) if text else None, here=cluster is None)
    try:
        report = make_report(found, policies, spec, time.perf_counter, cluster is not None)
    except ConfigError as error:
        if cluster is None:
            raise
        if error.where in ClusterSpec.model_fields:
            raise ConfigError(error.message, where=cluster_place(cluster, error.where), hint=error.hint) from None
        told = f"job {error.where} {error.message}"  # which fits on no device
        raise ConfigError(told, where=cluster_place(cluster, "memory"), hint=error.hint) from None
    if html is not None:
        from muxtune.cli.plan_page import write_page

        drawn = write_page(Path(html), report, Path(config).name, records)
        if record is not None and not drawn:
            tell(f"warning: {record}: no round of this run trained any of these tasks, so nothing measured is shown")
    if as_json:
        print_json(_as_json(report))
    else:
        _show(report, compare=len(policies) > 1)
    if html is not None:
        tell(f"picture: {html}")


def _policies(asked: str | None, configured: Policy) -> tuple[Policy, ...]:
    """The one to show first, then those it is compared with."""
    from muxtune.spec.policy import POLICIES

    if asked is None:
        return (configured,)
    if asked == "all":
        return ("muxtune", *(one for one in POLICIES if one != "muxtune"))
    for one in POLICIES:
        if one == asked:
            return (one,)
    raise ConfigError(f"should be one of {', '.join(POLICIES)} or all, got {asked!r}", where="--policy")


def _records(folder: str) -> Sequence[RoundRecord]:
    from muxtune.engine.trace_file import read_traces

    records = tuple(read_traces(Path(folder)))
    if not records:
        raise StateError("no rounds are recorded here", where=folder, hint="give the output_dir of a run")
    return records


def _show(report: Report, *, compare: bool) -> None:
    from muxtune.cli.plan_report import line, soon

    out = console(sys.stdout)
    print(line(report))
    for note in report.notes:
        print(f"note: {note}")
    print()
    table = grid("hTask", "rows", "passes", "s", "saved", "with the next", "tasks")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for row in report.htasks:
        table.add_row(str(row.htask), f"{row.rows:,}", str(row.passes), f"{row.s:.3f}", row.saved, row.more, row.tasks)
    out.print(table, soft_wrap=True)
    if compare:
        print()
        table = grid("policy", "hTasks", "passes", "s", "tokens/s", "x", "unused", "peak", "all done")
        for policy in report.policies:
            table.add_row(*policy.cells)
        out.print(table, soft_wrap=True)
    print()
    table = grid("task", "rows", "chunks", "steps", "adapter", "done after")
    for task in report.tasks:
        table.add_row(task.name, f"{task.rows:,}", str(task.chunks), f"{task.steps:,}", task.adapter, soon(task.done_s))
    out.print(table, soft_wrap=True)
    for name in report.waiting:
        print(f"{name}: waits for memory; planned when it starts")


def _as_json(report: Report) -> dict[str, object]:
    return {
        "plan": asdict(report.outlook.plan),
        "iteration_s": report.outlook.iteration_s,
        "tokens_per_s": report.outlook.timeline.tokens_per_s,
        "utilisation": list(report.outlook.timeline.utilisation),
        "bubble_share": report.outlook.timeline.bubble_share,
        "stall_share": report.outlook.timeline.stall_share,
        "planned_s": report.planned_s,
        "reasons": [asdict(reason) for reason in report.reasons],
        "tasks": [asdict(task) for task in report.tasks],
        "policies": [policy.as_json for policy in report.policies],
        "waiting": list(report.waiting),
        "recompute": report.forecast.recompute,
        "notes": list(report.notes),
    }
