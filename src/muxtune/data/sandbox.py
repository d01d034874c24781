"""Renders a chat template in a process that can be killed: bounds on time, memory and output.

jinja2's sandbox keeps a template from Python's internals, not from burning the machine (`'a' * 10**9`, nested loops),
so every template, our own included, is rendered by `sandbox_worker.py` in a subprocess. One worker serves one template
over many conversations: a request costs a pipe round trip, a start about 0.1 s. It starts on first use, ends by itself
when idle, and is started anew when needed, so a `Sandbox` may be kept for as long as one likes.

Failures are of two kinds. What one conversation causes (`raise_exception`, an undefined value) is a `TemplateFault`,
handed back for that rendering alone. What a template must not do at all (forbidden names, a limit, a crash, bad
syntax) is a `DataError` that names the template, and the worker is gone.

The worker is started as `python -I -S FILE` in a session of its own with an almost empty environment: it sees neither
this process's modules, however much is loaded here, nor its secrets, nor the terminal's Ctrl-C.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from muxtune.errors import DataError

_WORKER = Path(__file__).with_name("sandbox_worker.py")
_START_S = 60.0  # to start python and import jinja2 on a machine under load
_HINTS = {
    "security": "a chat template may use messages, tools, bos_token, eos_token and add_generation_prompt, nothing else",
    "syntax": "correct the template, or set chat_template to another file or a bundled name",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request (all the renderings of one conversation) may cost."""

    time_s: float = 10.0
    memory_bytes: int = 512 * 2**20
    output_chars: int = 16 * 2**20
    idle_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the template sees: plain JSON values only."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Render the first `count` messages of conversation number `conversation`."""

    conversation: int
    count: int
    generation_prompt: bool = False


@dataclass(frozen=True, slots=True)
class TemplateFault:
    """The template refused, or failed on, this conversation."""

    message: str


@dataclass(frozen=True, slots=True)
class Renderings:
    """`texts[k]` answers ask k; `generation` are the character spans of `{% generation %}` blocks in texts[0]."""

    texts: tuple[str | TemplateFault, ...]
    generation: tuple[tuple[int, int], ...] = ()


class Sandbox:
    """One template in one worker. Safe to call from several threads (one at a time goes in)."""

    def __init__(self, source: str, *, name: str, now: datetime, limits: Limits | None = None) -> None:
        self.name = name
        self._limits = limits or Limits()
        self._setup = {
            "source": source,
            "now": now.isoformat(),
            "time_s": self._limits.time_s,
            "memory_bytes": self._limits.memory_bytes,
            "output_chars": self._limits.output_chars,
            "idle_s": 2 * self._limits.idle_s,  # so that a worker in use here is never about to end
        }
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._used_s = 0.0

    def render(
        self, conversations: Sequence[Conversation], asks: Sequence[Ask], variables: Mapping[str, str]
    ) -> Renderings:
        """Raises DataError where the template breaks a rule; see the module's text."""
        request = {
            "conversations": [{"messages": chat.messages, "tools": chat.tools} for chat in conversations],
            "variables": variables,
            "renders": [(ask.conversation, ask.count, ask.generation_prompt) for ask in asks],
        }
        with self._lock:
            worker = self._ready_worker()
            try:
                reply = worker.ask(request, self._limits.time_s)
                return _renderings(self._accept(reply))
            except (_LostError, _SlowError, DataError) as error:
                self._stop()
                raise self._refusal(error) from None
            finally:
                self._used_s = time.monotonic()

    def close(self) -> None:
        """End the worker; a later `render` starts another."""
        with self._lock:
            self._stop()

    def _ready_worker(self) -> _Worker:
        if self._worker is not None and time.monotonic() - self._used_s > self._limits.idle_s:
            self._stop()
        if self._worker is None:
            worker = _Worker(self._limits.output_chars)
            weakref.finalize(self, worker.stop)
            self._worker = worker
            try:
                self._accept(worker.ask(self._setup, _START_S + self._limits.time_s))
            except (_LostError, _SlowError, DataError) as error:
                self._stop()
                raise self._refusal(error) from None
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _accept(self, reply: Mapping[str, object]) -> Mapping[str, object]:
        fatal = reply.get("fatal")
        if isinstance(fatal, list):
            kind, message = fatal
            raise DataError(
                f"the chat template cannot be used: {message}", where=f"template {self.name}", hint=_HINTS.get(kind)
            )
        return reply

    def _refusal(self, error: Exception) -> DataError:
        """What to tell the user, without a word of the conversation."""
        if isinstance(error, DataError):
            return error
        message = (
            f"the chat template takes longer than {self._limits.time_s:g} s for one conversation"
            if isinstance(error, _SlowError)
            else "the chat template crashed its sandbox or outgrew its limits"
        )
        return DataError(message, where=f"template {self.name}", hint="set chat_template to a simpler template")


class _LostError(Exception):
    """The worker ended, or wrote what is no frame."""


class _SlowError(Exception):
    """The worker did not answer in time."""


class _Worker:
    """The process and its pipes."""

    def __init__(self, output_chars: int) -> None:
        self._largest_bytes = 6 * output_chars + 2**20  # JSON writes a control character as six
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_WORKER), *_library_paths()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ},
            start_new_session=True,
        )

    def ask(self, request: Mapping[str, object], time_s: float) -> Mapping[str, object]:
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline_s = time.monotonic() + time_s
        body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            self._process.stdin.write(struct.pack(">I", len(body)) + body)
            self._process.stdin.flush()
        except OSError:
            raise self._loss() from None
        (length,) = struct.unpack(">I", self._read(self._process.stdout, 4, deadline_s))
        if length > self._largest_bytes:
            raise _LostError
        try:
            reply = json.loads(self._read(self._process.stdout, length, deadline_s).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            raise _LostError from None
        if not isinstance(reply, dict):
            raise _LostError
        return reply

    def _read(self, stream: IO[bytes], count: int, deadline_s: float) -> bytes:
        poller = select.poll()
        poller.register(stream.fileno(), select.POLLIN)
        parts: list[bytes] = []
        while count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise _SlowError
            part = os.read(stream.fileno(), min(count, 2**20))
            if not part:
                raise self._loss()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _loss(self) -> _LostError | _SlowError:
        """The worker's own alarm rang, or it died of something else."""
        self._process.kill()
        return _SlowError() if self._process.wait() == -signal.SIGALRM else _LostError()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except OSError:  # unsent bytes for a process that is gone
                    continue


def _renderings(reply: Mapping[str, object]) -> Renderings:
    texts: list[str | TemplateFault] = []
    whole = ""
    try:
        for result in reply["results"]:  # type: ignore[attr-defined]
            if "error" in result:
                texts.append(TemplateFault(str(result["error"])))
                continue
            texts.append(whole[: int(result["common"])] + str(result["tail"]))
            whole = whole or str(texts[-1])
        spans = tuple((int(start), int(end)) for start, end in reply["generation"])  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        raise _LostError from None
    return Renderings(tuple(texts), spans)


def _library_paths() -> list[str]:
    """The folders that hold jinja2 and what it imports."""
    folders: list[str] = []
    for package in ("jinja2", "markupsafe"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise DataError(f"the package {package} is not installed", hint="pip install jinja2")
        folder = str(Path(spec.origin).parent.parent)
        if folder not in folders:
            folders.append(folder)
    return folders
