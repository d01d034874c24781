"""The live table: the tasks that run, first; then what failed, waits or is done; and a row of totals.

It is drawn for a given width and height and never exceeds them: tasks that do not fit are counted in one line, columns
that do not fit are left out, least important first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muxtune.cli.terminal import counted, duration
from muxtune.cli.view import RunView, TaskView

_HEADINGS = ("task", "PEFT", "step", "epoch", "loss", "eval", "lr", "tok/s", "ETA", "state")
_DROPPED_FIRST = ("PEFT", "epoch", "lr", "eval", "tok/s", "ETA", "loss", "state")
_ORDER = ("running", "failed", "paused", "queued", "waiting", "cancelled", "completed")
_STYLES = {"running": "bold", "failed": "bold red", "completed": "green"}
_SHORT = {"completed": "done"}
_NAME_WIDTH = 8
Row = dict[str, str]


def live_table(view: RunView, *, width: int, height: int) -> RenderableType:
    """At most `height` lines of at most `width` columns."""
    tasks = sorted(view.tasks.values(), key=lambda task: _ORDER.index(task.state))
    lines = height - 2 - bool(view.note)  # headings and totals
    shown = tasks if len(tasks) <= lines else tasks[: max(1, lines - 1)]
    rows = [_row(task) for task in shown]
    totals = _totals(view)
    columns, name_width = _columns([*rows, totals], width)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in columns:
        if heading == "task":
            table.add_column(heading, no_wrap=True, max_width=name_width, overflow="ellipsis")
        else:
            table.add_column(heading, no_wrap=True, justify="left" if heading in ("PEFT", "state") else "right")
    for task, row in zip(shown, rows, strict=True):
        table.add_row(*(row[heading] for heading in columns), style=_STYLES.get(task.state, ""))
    table.add_row(*(totals[heading] for heading in columns), style="bold")
    more = [Text(_hidden(tasks[len(shown) :]), no_wrap=True, overflow="ellipsis")] if len(shown) < len(tasks) else []
    note = [Text(view.note, no_wrap=True, overflow="ellipsis")] if view.note else []
    return Group(table, *more, *note)


def step_text(task: TaskView) -> str:
    """12/300, as far as it is known."""
    return f"{task.step}/{task.total}" if task.total is not None else str(task.step or "-")


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(task: TaskView) -> Row:
    speed = task.pace.tokens_per_s if task.active else None
    cells = (
        task.name,
        task.peft,
        step_text(task),
        number(task.epoch, ".1f"),
        number(task.loss, ".4f"),
        number(task.eval_loss, ".4f"),
        number(task.lr, ".1e"),
        number(speed, ".0f"),
        duration(task.eta_s),
        _SHORT.get(task.state, task.state),
    )
    return dict(zip(_HEADINGS, cells, strict=True))


def _totals(view: RunView) -> Row:
    known = [task for task in view.tasks.values() if task.total is not None]
    steps = f"{sum(task.step for task in known)}/{sum(task.total or 0 for task in known)}"
    running = len(view.with_state("running"))
    speed = view.pace.tokens_per_s if running else None
    count = len(view.tasks)
    row = dict.fromkeys(_HEADINGS, "")
    row |= {"task": counted(count, "job"), "step": steps, "tok/s": number(speed, ".0f")}
    return row | {"ETA": duration(view.eta_s), "state": f"{running} running"}


def _columns(rows: Sequence[Row], width: int) -> tuple[list[str], int]:
    """The columns that fit beside a name of at least a few letters, and the width that is left for names."""
    columns = list(_HEADINGS)
    for dropped in (None, *_DROPPED_FIRST):
        if dropped is not None:
            columns.remove(dropped)
        taken = sum(max(len(heading), *(len(row[heading]) for row in rows)) + 1 for heading in columns[1:])
        if width - taken - 1 >= _NAME_WIDTH:
            break
    return columns, max(1, width - taken - 1)


def _hidden(tasks: Sequence[TaskView]) -> str:
    counts = Counter(_SHORT.get(task.state, task.state) for task in tasks)
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"... {len(tasks)} more: {told}"
