"""`muxtune train --tp N`: starts the ranks of a run on this machine, and sees to it that all of them end.

The ranks are processes of the same command line, in process groups of their own, so that a terminal's Ctrl-C reaches
this process alone, which hands it to rank 0: that one saves and ends the run as on one device. Rank 0 prints; what the
others print goes to `.muxtune.ranks/RANK.log` in the output folder. They meet in a scratch folder: no port is involved.

    a rank dies           noticed within a moment; rank 0 is told which, ends the run with that error and its summary
    a rank shows no life  after `timeout_s` it is taken for dead, and ended
    rank 0 does           the error is said here
    this process dies     the kernel ends the ranks (`end_with`)

Whatever happens, no rank is left when this process ends. No torch here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from muxtune.cli.errors import print_error
from muxtune.cli.rank_place import FOLDER, LOGS, LOST, end_with, read_fate, write_fate
from muxtune.cli.terminal import tell
from muxtune.durable import make_folder
from muxtune.errors import ConfigError, RankError

_POLL_S = 0.05
_BEGUN_WITHIN_S = 60.0  # the first sign of life
_GRACE_S = 20.0  # for rank 0 to say what it knows, once another is lost
_INSISTED_S = 10.0  # for it to end when it is told to at once
_LAST_S = 10.0  # for the others to end after it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130


@dataclass(slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    log_from: int  # bytes that were there before
    beat_at: int = 0  # what its beat said last, and when that was new
    seen_s: float = 0.0

    def last_line(self) -> str:
        """Of what it has written, if it has."""
        try:
            written = self.log.read_bytes()[self.log_from :] if self.log is not None else b""
        except OSError:
            written = b""
        lines = written.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


@dataclass(slots=True)
class Starter:
    """Args:
    arguments: the command line of each rank, after `muxtune`.
    output: the run's output folder.
    timeout_s: how long a rank may show no sign of life.
    clock: seconds, monotonic.
    """

    size: int
    arguments: Sequence[str]
    output: Path
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    _children: list[_Child] = field(default_factory=list, init=False)
    _requests: int = field(default=0, init=False)  # to stop
    _deadline_s: float | None = field(default=None, init=False)

    def run(self, environment: Mapping[str, str]) -> int:
        """The exit status of the run. Raises ConfigError where the output folder cannot be written."""
        folder = Path(tempfile.mkdtemp(prefix="muxtune-ranks-"))
        before = {
            number: signal.signal(number, self._hear)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            for rank in range(self.size):
                self._children.append(self._start(rank, folder, environment))
            return self._watch(folder)
        finally:
            for child in self._children:
                child.process.kill()
                child.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, rank: int, folder: Path, environment: Mapping[str, str]) -> _Child:
        own = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.size, FOLDER: folder}
        threads = max(1, (os.cpu_count() or 1) // self.size)
        defaults = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
        variables = {**defaults, **environment, **{name: str(value) for name, value in own.items()}}
        log = self.output / LOGS / f"{rank}.log" if rank else None
        size = log.stat().st_size if log is not None and log.exists() else 0
        try:
            if log is not None:
                make_folder(log.parent)
            stream = open(log, "ab") if log is not None else None  # noqa: SIM115 - closed below
        except OSError as error:
            raise ConfigError(f"cannot be written: {log}: {error.strerror}", where="output_dir") from None
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "muxtune", *self.arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                process_group=0,
                preexec_fn=partial(end_with, os.getpid()) if sys.platform == "linux" else None,
            )
        finally:
            if stream is not None:
                stream.close()
        return _Child(rank, process, log, size, seen_s=self.clock())

    def _watch(self, folder: Path) -> int:
        first, others = self._children[0], self._children[1:]
        looked_s = self.clock()
        while (status := first.process.poll()) is None:
            for child in others:
                self._look(child, folder)
            now_s = self.clock()
            paused_s, looked_s = now_s - looked_s - _POLL_S, now_s
            for child in self._children:
                self._feel(child, folder, max(0.0, paused_s))
            if self._deadline_s is not None and now_s > self._deadline_s:
                first.process.kill()
            time.sleep(_POLL_S)
        self._see_out(others)
        return self._status(status, folder)

    def _look(self, child: _Child, folder: Path) -> None:
        """Note how one has ended; that it follows another is no news."""
        status = child.process.poll()
        if status is None or status == 0:
            return
        if status != LOST:
            write_fate(folder, child.rank, _ended(child, status))
        self._give(_GRACE_S)

    def _feel(self, child: _Child, folder: Path, paused_s: float) -> None:
        """Whether one still shows signs of life; time in which this process did not run does not count."""
        try:
            beat = int((folder / f"beat-{child.rank}").read_bytes() or b"0")
        except (OSError, ValueError):
            beat = child.beat_at
        child.seen_s += paused_s
        if beat != child.beat_at:
            child.beat_at, child.seen_s = beat, self.clock()
        allowed_s = self.timeout_s if child.beat_at else max(self.timeout_s, _BEGUN_WITHIN_S)
        if child.process.poll() is None and self.clock() - child.seen_s > allowed_s:
            write_fate(folder, child.rank, _silent(child, allowed_s))
            child.process.kill()
            self._give(_GRACE_S)

    def _give(self, grace_s: float) -> None:
        """So long from now on rank 0 may take to end, if it has not been told so before."""
        if self._deadline_s is None:
            self._deadline_s = self.clock() + grace_s

    def _see_out(self, others: Sequence[_Child]) -> None:
        until_s = self.clock() + _LAST_S
        while any(child.process.poll() is None for child in others) and self.clock() < until_s and self._requests < 2:
            if any(child.process.poll() not in (None, 0) for child in others):
                return
            time.sleep(_POLL_S)

    def _status(self, status: int, folder: Path) -> int:
        """Rank 0 has said what there is to say, unless it was killed."""
        if status >= 0:
            return status
        if self._requests:
            tell("stopped at once; the newest checkpoints stay")
            return _INTERRUPTED
        print_error(read_fate(folder, self.size) or _ended(self._children[0], status))
        return 1

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Hand a signal on to rank 0; the second one has to be obeyed."""
        self._requests += 1
        for child in self._children[:1]:
            child.process.send_signal(number)
        if self._requests > 1:
            self._deadline_s = self.clock() + _INSISTED_S


def _ended(child: _Child, status: int) -> RankError:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        memory = ", as the system does where memory runs out" if -status == signal.SIGKILL else ""
        told = f"was killed ({name}{memory})"
    else:
        last = child.last_line()
        told = f"ended with status {status}" + (f": {last}" if last else "")
    log = f"what it wrote is in {child.log}; " if child.log is not None else ""
    return RankError(told, rank=child.rank, hint=log + RankError.again)


def _silent(child: _Child, timeout_s: float) -> RankError:
    return RankError(
        f"has shown no sign of life for {timeout_s:g} s",
        rank=child.rank,
        hint=f"see whether its machine hangs or swaps (--rank-timeout sets how long to wait); {RankError.again}",
    )
