"""Events as plain lines, for logs: `sql step=10/300 epoch=0.4 loss=1.2345 lr=2.0e-04 grad_norm=0.81 tok/s=5321`.

No line holds text of an example.
"""

from __future__ import annotations

from muxtune.cli.table import number, step_text
from muxtune.cli.view import RunView, TaskView
from muxtune.spec.event import EvalResult, RunEvent, StepResult, TaskEvent


def line_of(event: RunEvent, view: RunView) -> str | None:
    """The line of an event that the view has heard; None for one that is not told."""
    task = view.tasks[event.task]
    if isinstance(event, StepResult):
        told = event.step % task.logging_steps == 0 or event.step == task.total
        return _step_line(task) if told else None
    if isinstance(event, EvalResult):
        return f"{event.task} eval step={step_text(task)} loss={event.loss:.4f} accuracy={event.accuracy:.3f}"
    return _event_line(event, task)


def _step_line(task: TaskView) -> str:
    return (
        f"{task.name} step={step_text(task)} epoch={number(task.epoch, '.2f')} loss={number(task.loss, '.4f')} "
        f"lr={number(task.lr, '.1e')} grad_norm={number(task.grad_norm, '.2f')} "
        f"tok/s={number(task.pace.tokens_per_s, '.0f')}"
    )


def _event_line(event: TaskEvent, task: TaskView) -> str | None:
    match event.kind:
        case "sample":
            return None
        case "queued" if event.step == 0:
            return f"{event.task} queued, {task.total} steps{_because(event)}"
        case "completed" if task.earlier:
            return f"{event.task} completed earlier: {event.message}"
        case "failed":
            told = f"{event.task} failed at step {event.step}: {event.message} [{event.data.get('code', 'failed')}]"
            return f"{told}\n  {hint}" if (hint := event.data.get("hint")) else told
        case "warning":
            return f"{event.task} warning: {event.message}"
    return f"{event.task} {event.kind} step={step_text(task)}{_because(event)}"


def _because(event: TaskEvent) -> str:
    return f": {event.message}" if event.message else ""
