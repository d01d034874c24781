"""A process that runs command lines of muxtune: `python -m tests.cli.shell`.

It imports torch once. Each order - a line of JSON on stdin - is carried out by a forked child: a process of its own,
with its own streams, working folder, environment and (where asked) terminal, which calls the `main` that the installed
`muxtune` calls. The answer to "start" is the child's id, the answer to "poll" its exit status or null. `Shell` is the
other side.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLUMNS, LINES = 100, 24
_HEAVY = ("muxtune.cli.main", "muxtune.cli.dry_run", "muxtune.cli.progress", "muxtune.engine.training")


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


class Terminal:
    """A pseudo-terminal of 24 lines; what is written to it is kept."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.path = os.ttyname(self._slave)
        self._seen = b""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def read(self) -> str:
        """All that has been written so far."""
        while select.select([self._master], [], [], 0)[0]:
            self._seen += os.read(self._master, 1 << 16)
        return self._seen.decode(errors="replace")

    def close(self) -> None:
        os.close(self._master)
        os.close(self._slave)


class Running:
    """A command line that has been started."""

    def __init__(self, shell: Shell, pid: int, out: Path, err: Path, terminal: Terminal | None) -> None:
        self._shell, self.pid, self._out, self._err, self._terminal = shell, pid, out, err, terminal

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def until(self, reached: Callable[[], bool], timeout_s: float = 60) -> None:
        """Wait, reading the terminal, until something is so."""
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            if self._terminal is not None:
                self._terminal.read()
            assert time.monotonic() < deadline_s, (self._out.read_text(), self._err.read_text())
            time.sleep(0.005)

    def wait(self) -> Ended:
        code: list[int] = []

        def ended() -> bool:
            answer = self._shell.ask({"do": "poll", "pid": self.pid})
            code.extend([] if answer is None else [answer])
            return answer is not None

        self.until(ended, timeout_s=120)
        return Ended(code[0], self._out.read_text(), self._err.read_text())


class Shell:
    """Runs command lines in `folder`; `environment` is added to the one here."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".shell-"))
        self._commands = 0
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, **environment: str) -> Ended:
        return self.start(arguments, environment=environment).wait()

    def start(
        self,
        arguments: Sequence[str],
        *,
        terminal: Terminal | None = None,
        environment: Mapping[str, str] | None = None,
        file_bytes: int | None = None,
    ) -> Running:
        """`file_bytes`: no file may grow beyond it, as on a full disk."""
        self._commands += 1
        out, err = (self._scratch / f"{self._commands}.{name}" for name in ("out", "err"))
        out.touch(), err.touch()
        order = {
            "do": "start",
            "arguments": list(arguments),
            "folder": str(self._folder),
            "environment": dict(environment or {}),
            "out": str(out),
            "err": str(err),
            "terminal": terminal.path if terminal else None,
            "file_bytes": file_bytes,
        }
        pid = self.ask(order)
        assert pid is not None
        return Running(self, pid, out, err, terminal)

    def ask(self, order: Mapping[str, object]) -> int | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.shell"],
                cwd=ROOT,
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def main() -> None:
    for module in _HEAVY:
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            answer: int | None = _start(order)
        else:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)


def _start(order: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        _take_streams(order)
        _take_signals()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.argv = ["muxtune", *order["arguments"]]
        if order["file_bytes"] is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"], resource.RLIM_INFINITY))
        from muxtune.cli.main import main

        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_signals() -> None:
    """As a person's shell leaves them, whatever the tests themselves were started to ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _take_streams(order: Mapping[str, Any]) -> None:
    """Streams as a shell would give them: files, or a terminal that becomes the controlling one."""
    if order["terminal"]:
        for number in (0, 1, 2):
            os.dup2(os.open(order["terminal"], os.O_RDWR), number)
    else:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(order[name], os.O_WRONLY), number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", line_buffering=number == 2 or raw.isatty()))


if __name__ == "__main__":
    main()
