"""What a run came to, on stdout when it has ended: a row a job, its replies, and what to do next."""

from __future__ import annotations

import sys

from muxtune.cli.table import number, step_text
from muxtune.cli.terminal import console, counted, grid, printable
from muxtune.cli.view import RunView, TaskView


def print_summary(view: RunView, output_dir: str) -> None:
    """The table of all jobs, then their replies to `sample_prompts`."""
    table = grid("job", "status", "step", "loss", "eval loss")
    table.columns[1].justify = "left"
    table.add_column("folder")
    for task in view.tasks.values():
        table.add_row(
            task.name,
            _state(task),
            step_text(task),
            number(task.loss, ".4f"),
            number(task.eval_loss, ".4f"),
            task.message if task.state == "failed" else f"{output_dir.rstrip('/')}/{task.name}",
        )
    out = console(sys.stdout)
    out.print(table, soft_wrap=True)
    for task in view.tasks.values():
        for prompt, reply in task.samples:
            out.print(f"\n{task.name} > {printable(prompt)}\n{printable(reply)}", soft_wrap=True)


def ending(view: RunView) -> str:
    """One line: how many jobs ended how, the failed ones by name."""
    failed = view.with_state("failed")
    done = len(view.with_state("completed"))
    count = len(view.tasks)
    told = f"{done} of {counted(count, 'job')} completed"
    return f"{told}; failed: {_names(failed)}" if failed else told


def _state(task: TaskView) -> str:
    """As people say it: what waits with steps behind it has been stopped, and nothing waits once the run has ended."""
    if task.earlier:
        return "completed earlier"
    if task.state in ("queued", "waiting") and task.step:
        return "stopped"
    return "not started" if task.state == "waiting" else task.state


def _names(tasks: list[TaskView]) -> str:
    return ", ".join(task.name for task in tasks)
