"""A process that trains what it is told to and dies where it is told to: `python -m tests.engine.trainer`.

It imports torch once. Each order - a line of JSON on stdin - is carried out by a forked child, a process of its own
that takes no time to start, with one thread; the answer to "start" is its id, the answer to "wait" how it ended. A
child writes down what it executed as it goes: a line per optimizer step, with the examples of its schedule.

Where it dies: an audit hook sees every file operation under the output folder *before* it happens, and the child kills
itself with SIGKILL at the one that was named - so every moment between two file operations can be had, without a change
to the code under test. With `file_bytes` it does not kill itself there but from then on lets no file grow by more than
that, as a full disk would: the kernel then fails the write half-way, or kills the process half-way through it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muxtune.engine import training as training_module
from muxtune.engine.local import LocalEngine
from muxtune.engine.training import TrainingRun
from muxtune.errors import MuxTuneError
from muxtune.plan.types import MicroBatch, RoundRecord, RoundSchedule
from muxtune.spec.run import RunSpec

_OPERATIONS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.chmod")


@dataclass(frozen=True, slots=True)
class Order:
    """One run. `operation`, `path` (patterns) and `nth` name the file operation at which to die, or the disk is full -
    which kills if `fatal`; `hold` is a file for which to wait after the second round; `process_bytes` is what the
    process is said to have in use, of as much as one likes."""

    run: dict[str, object]
    trace: str
    report: str
    resume: bool = False
    overwrite: bool = False
    keep_going: bool = False
    operation: str | None = None
    path: str = ""
    nth: int = 1
    file_bytes: int | None = None
    fatal: bool = False
    hold: str | None = None
    process_bytes: int | None = None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "start":
            answer = _start(Order(**message["order"]))
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(message["pid"], 0)[1])
        print(json.dumps(answer), flush=True)


def _start(order: Order) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.dup2(2, 1)  # the answers' pipe ends with the process that answers
        _train(order)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _train(order: Order) -> None:
    run = RunSpec.model_validate(order.run)
    counted = _watch(run.output_dir, order)
    _record(Path(order.trace))
    if order.process_bytes is not None:
        training_module.memory_here = lambda device: (order.process_bytes or 0, 10**15)
    training = TrainingRun(
        run, resume=order.resume, overwrite=order.overwrite, keep_going=order.keep_going, stop=_hold(order.hold)
    )
    error = ""
    try:
        for _ in training.events():
            pass
    except MuxTuneError as caught:
        error = f"{type(caught).__name__}: {caught}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(order.report).write_text(json.dumps({"error": error, "operations": counted()}))


def _watch(output: str, order: Order) -> Callable[[], int]:
    """Count the writing operations under `output`, and die before the one that the order names."""
    wanted = re.compile(order.operation) if order.operation is not None else None
    path_wanted = re.compile(order.path)
    seen = matched = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen, matched
        if event == "open":
            flags = arguments[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event not in _OPERATIONS:
            return
        paths = " ".join(str(argument) for argument in arguments if isinstance(argument, str | os.PathLike))
        if output not in paths:
            return
        seen += 1
        if wanted is not None and wanted.fullmatch(event) and path_wanted.search(paths):
            matched += 1
            if matched == order.nth:
                _strike(order, str(arguments[0]))

    sys.addaudithook(hook)
    return lambda: seen


def _strike(order: Order, path: str) -> None:
    if order.file_bytes is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        limit = order.file_bytes + (os.path.getsize(path) if os.path.isfile(path) else 0)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if order.fatal else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _record(trace: Path) -> None:
    execute = LocalEngine.execute

    def recording(self: LocalEngine, schedule: RoundSchedule) -> RoundRecord:
        record = execute(self, schedule)
        with open(trace, "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in _steps(record)))
        return record

    LocalEngine.execute = recording  # type: ignore[method-assign]


def _steps(record: RoundRecord) -> list[dict[str, object]]:
    examples: dict[str, list[int]] = {}
    for action in record.schedule.actions:
        for item in action.items if isinstance(action, MicroBatch) else ():
            if item.kind == "train" and item.task is not None:
                examples.setdefault(item.task, []).extend(ref.index for ref in item.sequences)
    outcomes = [action.step for action in record.actions if action.step is not None]
    return [
        {"task": step.task, "step": step.step, "examples": examples[step.task], "loss": step.loss, "lr": step.lr}
        for step in outcomes
        if step.error is None
    ]


def _hold(flag: str | None) -> Callable[[], bool]:
    rounds = 0

    def stop() -> bool:
        nonlocal rounds
        rounds += 1
        if flag is not None and rounds == 3:
            Path(flag + ".reached").touch()
            while not Path(flag).exists():
                time.sleep(0.01)
        return False

    return stop


if __name__ == "__main__":
    main()
