"""`muxtune trace`: what a run's passes were made of, round by round, from the records it keeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.cli.terminal import console, counted, grid, print_json
from muxtune.errors import StateError

if TYPE_CHECKING:
    from muxtune.plan.types import Plan, RoundRecord

Run = Annotated[str, typer.Argument(metavar="RUN", help="The output folder of a run.", show_default=False)]
Last = Annotated[int, typer.Option("-n", "--last", metavar="N", min=1, help="How many of the newest rounds to list.")]
Json = Annotated[bool, typer.Option("--json", help="The totals as JSON.")]


def trace(run: Run, last: Last = 20, as_json: Json = False) -> None:
    """Show the rounds of a run: passes, rows, what part of them was no token, and the plan last in force."""
    from muxtune.engine.trace_file import read_lines
    from muxtune.plan.types import Plan

    records: list[RoundRecord] = []
    plans: list[Plan] = []
    for line in read_lines(Path(run)):
        if isinstance(line, Plan):
            plans.append(line)
        else:
            records.append(line)
    if not records:
        raise StateError("no rounds are recorded here", where=run, hint="give the output_dir of a run")
    if as_json:
        print_json({**_totals(records), "plans": len(plans)})
        return
    _show(records, last)
    if plans:
        print(_line(plans))


def _totals(records: Sequence[RoundRecord]) -> dict[str, float | int]:
    rows, tokens = sum(record.rows for record in records), sum(record.tokens for record in records)
    return {
        "rounds": len(records),
        "passes": sum(_passes(record) for record in records),
        "steps": sum(_steps(record) for record in records),
        "rows": rows,
        "tokens": tokens,
        "ineffective": 1 - sum(record.computed for record in records) / rows if rows else 0.0,
        "wall_s": sum(record.wall_s for record in records),
    }


def _passes(record: RoundRecord) -> int:
    """One that goes on from what another has kept brings no rows, and is one all the same."""
    from muxtune.plan.types import MicroBatch

    return sum(isinstance(record.schedule.actions[done.action], MicroBatch) for done in record.actions)


def _steps(record: RoundRecord) -> int:
    return sum(action.step is not None for action in record.actions)


def _kinds(record: RoundRecord) -> str:
    from muxtune.plan.types import MicroBatch

    passes = [action for action in record.schedule.actions if isinstance(action, MicroBatch)]
    return "+".join(sorted({item.kind for action in passes for item in action.items}))


def _line(plans: Sequence[Plan]) -> str:
    count, last = len(plans), plans[-1]
    htasks = " | ".join(" ".join(htask.tasks) for htask in last.htasks)
    return f"{counted(count, 'plan')}, the last: {htasks}, {last.iteration_s:.3f} s an iteration predicted"


def _show(records: Sequence[RoundRecord], last: int) -> None:
    table = grid("round", "what", "passes", "widest", "rows", "tokens", "unused", "steps", "s")
    for record in records[-last:]:
        unused = 1 - record.computed / record.rows if record.rows else 0.0
        table.add_row(
            str(record.schedule.round),
            _kinds(record),
            str(_passes(record)),
            str(max((action.rows for action in record.actions), default=0)),
            str(record.rows),
            str(record.tokens),
            f"{unused:.1%}",
            str(_steps(record)),
            f"{record.wall_s:.2f}",
        )
    console(sys.stdout).print(table, soft_wrap=True)
    totals = _totals(records)
    print(
        f"{totals['rounds']} rounds, {totals['passes']} passes, {totals['steps']} optimizer steps, "
        f"{totals['rows']:,} rows, {totals['ineffective']:.1%} of them no token, {totals['wall_s']:.1f} s"
    )
