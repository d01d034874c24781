"""Stopping in an orderly way: the first signal asks, the second insists.

SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) mean the same. While nothing trains yet there is nothing to
save, so the first one ends the program; once `graceful` is set it asks the round loop to stop at the step boundary. A
signal that the process was started to ignore (nohup, a job in the background of a script) stays ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """A context manager, and the `stop` question of a `TrainingRun`. `on_request` hears the first request, and whether
    it is one: an end may take a while, too, when libraries are at work."""

    def __init__(self, on_request: Callable[[bool], None]) -> None:
        self.graceful = False
        self.requested = False
        self._on_request = on_request
        self._before: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> StopSignal:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request(self.graceful)
        if not self.graceful:
            raise KeyboardInterrupt
