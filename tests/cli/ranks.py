"""Runs over several processes as a person starts them: real processes, which can be killed, stopped and looked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cli.projects import rows

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class RankedEnd:
    """How it ended, and after how many seconds of waiting."""

    code: int
    out: str
    err: str
    waited_s: float


class RankedRun:
    """`muxtune train` with the arguments, in `folder`; `launcher` stands before it, `python -m` by default."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        *,
        launcher: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        scratch = folder / ".ranked"
        scratch.mkdir(exist_ok=True)
        number = len(list(scratch.iterdir()))
        self._out, self._err = scratch / f"{number}.out", scratch / f"{number}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [*launcher, "muxtune", "train", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_take_signals,
            )
        self._known: set[psutil.Process] = set()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that are ranks now."""
        found: dict[int, psutil.Process] = {}
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return found
        for child in children:
            try:
                line, rank = child.cmdline(), child.environ().get("RANK")
            except psutil.Error:
                continue
            if "muxtune" in line and rank is not None:
                found[int(rank)] = child
        self._known |= set(found.values())
        return found

    def until(self, reached: Callable[[], bool], timeout_s: float = 90) -> None:
        """Wait until something is so. Fails where the run ends before."""
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            assert self.process.poll() is None, (self._out.read_text(), self._err.read_text())
            assert time.monotonic() < deadline_s, self._err.read_text()
            time.sleep(0.01)

    def after_steps(self, task: Path, count: int) -> None:
        self.until(lambda: len(steps_of(task)) >= count)
        self.ranks()

    def wait(self, timeout_s: float = 120) -> RankedEnd:
        """Its end, of all its ranks."""
        began_s = time.monotonic()
        code = self.process.wait(timeout_s)
        waited_s = time.monotonic() - began_s
        self.assert_gone()
        return RankedEnd(code, self._out.read_text(), self._err.read_text(), waited_s)

    def assert_gone(self, within_s: float = 5) -> None:
        """No process that was seen as a rank is left."""
        _, left = psutil.wait_procs(list(self._known), timeout=within_s)
        assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        """End what is left of it."""
        for process in [*self.ranks().values(), *self._known]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.kill()
        self.process.wait()


def steps_of(task: Path) -> list[int]:
    """Those in a task's metrics, whose last line may be half written."""
    try:
        return [row["train/global_step"] for row in rows(task) if "train/loss" in row]
    except ValueError:
        return []


def _take_signals() -> None:
    """As a person's shell leaves them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
