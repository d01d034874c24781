"""Who listens to a run: a table that redraws itself on a terminal, plain lines everywhere else.

A closed stderr - a pipe whose reader has gone - ends the telling, never the training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from muxtune.cli.lines import line_of
from muxtune.cli.table import live_table
from muxtune.cli.terminal import console, is_fancy, tell
from muxtune.cli.view import RunView
from muxtune.spec.event import RunEvent, TaskEvent

_REFRESH_PER_S = 4


class Progress(Protocol):
    """Hears each event once the view has taken it in."""

    def hear(self, event: RunEvent) -> None: ...
    def say(self, text: str) -> None: ...


class LineProgress:
    """Lines on stderr: events as they come, steps every `logging_steps` and at the end."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def hear(self, event: RunEvent) -> None:
        line = line_of(event, self._view)
        if line is not None:
            tell(line)

    def say(self, text: str) -> None:
        if text:
            tell(text)


class LiveProgress:
    """The table; what should stay on the screen is printed above it."""

    def __init__(self, live: Live, view: RunView) -> None:
        self._live = live
        self._view = view

    def hear(self, event: RunEvent) -> None:
        """What a user should not miss stays on the screen."""
        if isinstance(event, TaskEvent) and event.kind in ("warning", "failed"):
            with suppress(OSError):  # the terminal is gone
                self._live.console.print(line_of(event, self._view))

    def say(self, text: str) -> None:
        """Under the table: it may be said while the table is being drawn."""
        self._view.note = text


class _Table:
    """Drawn anew whenever the screen is, for the size it then has."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, _: object) -> Iterator[RenderableType]:
        yield live_table(self._view, width=console.width, height=console.height - 1)


@contextmanager
def progress_of(view: RunView) -> Iterator[Progress]:
    """The listener that stderr calls for."""
    if not is_fancy(sys.stderr):
        yield LineProgress(view)
        return
    screen = console(sys.stderr)
    with Live(
        _Table(view), console=screen, refresh_per_second=_REFRESH_PER_S, transient=True, redirect_stdout=False
    ) as live:
        yield LiveProgress(live, view)
