"""What a process knows of the ranks that it is one of, from its environment, and what it lets others know of itself.

Two may have started it: `muxtune train --tp N` (`muxtune.cli.starter`), which gives all ranks a folder on this machine
to meet in, or torchrun, which gives them an address. In the folder ranks also leave what only the starter could see
otherwise: a file that each touches as long as it lives, and why one has ended.

    meeting     where they meet (`torch.distributed`'s file store: no port that could be taken)
    beat-R      touched by rank R about once a second
    fate-R      why rank R has ended: JSON, by itself or by the starter

No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from muxtune.durable import write_durably
from muxtune.errors import ConfigError, RankError

FOLDER = "MUXTUNE_RANKS"  # the variable that names the meeting folder
LOGS = ".muxtune.ranks"  # in the output folder of a run: RANK.log
LOST = 75  # exit status of a rank that ended because another was lost
_BEAT_S = 1.0
_TOLD_WITHIN_S = 3.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `rank` of `size`, number `local` of the `here` on this machine. `folder`: of the starter; None under
    torchrun."""

    rank: int
    size: int
    here: int
    local: int
    folder: Path | None = None

    @property
    def meeting(self) -> str:
        """As `torch.distributed` calls it."""
        return "env://" if self.folder is None else f"file://{self.folder / 'meeting'}"

    def confess(self, error: RankError) -> None:
        """Leave word why this rank ends."""
        if self.folder is not None:
            write_fate(self.folder, self.rank, error)

    def diagnose(self, error: RankError) -> RankError:
        """The same error, or the one of the rank that caused it, where somebody leaves word of it."""
        if self.folder is None or error.rank is not None:
            return error
        deadline_s = time.monotonic() + _TOLD_WITHIN_S
        while (found := read_fate(self.folder, self.size)) is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return found or error


def rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """None where this process is no rank, or the only one. Raises ConfigError for variables that make no sense."""
    if not is_rank(environment):
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        here = int(environment.get("LOCAL_WORLD_SIZE", size))
        local = int(environment.get("LOCAL_RANK", rank % here if here else 0))
    except ValueError:
        rank, size, here, local = -1, 0, 0, 0
    if not 0 <= rank < size or not 0 <= local < here <= size:
        raise ConfigError(
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE do not say which rank this is",
            where="the environment",
            hint="unset them, or start the ranks with torchrun",
        )
    folder = environment.get(FOLDER)
    return RankPlace(rank, size, here, local, Path(folder) if folder else None) if size > 1 else None


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process was started as one of several, or the only one that could have been."""
    return environment.keys() >= {"RANK", "WORLD_SIZE"} and bool(environment.keys() & {FOLDER, "MASTER_ADDR"})


def end_process(status: int, environment: Mapping[str, str]) -> NoReturn:
    """End with `status`, a rank at once: threads of the group that it has met may still be letting go of tensors, for
    which they ask the interpreter, and where that is just being taken down the process aborts, whatever it has done."""
    if is_rank(environment):
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def write_fate(folder: Path, rank: int, error: RankError) -> None:
    """Keep the first word on a rank."""
    path = folder / f"fate-{rank}"
    if not path.exists():
        with contextlib.suppress(OSError):  # the starter has gone
            write_durably(path, json.dumps([error.message, error.hint]).encode())


def read_fate(folder: Path, size: int) -> RankError | None:
    """Of the lowest rank of which there is word."""
    for rank in range(size):
        with contextlib.suppress(OSError, ValueError):
            message, hint = json.loads((folder / f"fate-{rank}").read_bytes())
            return RankError(message, rank=rank, hint=hint)
    return None


def begin_as(place: RankPlace, environment: Mapping[str, str]) -> None:
    """What a rank does first: it ends with the starter or torchrun, and shows from now on that it lives."""
    if place.folder is not None or _TORCHRUN in environment:
        end_with(os.getppid())
    if place.folder is not None:
        file = place.folder / f"beat-{place.rank}"
        threading.Thread(target=_touch, args=(file,), name="beat", daemon=True).start()


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent does, however that happens (Linux; elsewhere a thread looks).

    The starter has its children do so before they are programs of their own: nothing can come between.
    """
    if _LIBC is None:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was too late
        os.kill(os.getpid(), signal.SIGKILL)


def write_to_log(path: Path) -> None:
    """Standard output and errors of this process go to the end of a file from now on. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)


def _touch(file: Path) -> None:
    while True:
        try:
            file.write_bytes(b"%d" % time.monotonic_ns())
        except OSError:  # the folder has gone: so has the starter
            return
        time.sleep(_BEAT_S)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_BEAT_S)
    os.kill(os.getpid(), signal.SIGKILL)
