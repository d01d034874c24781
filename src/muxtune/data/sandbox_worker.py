"""The process that renders chat templates: untrusted programs, run where they can do little and be killed.

Boundary: this file is run by path (`python -I -S`), never imported by the package, and imports the standard library
and jinja2 only, so that it starts in a tenth of a second and holds nothing worth stealing. It reads requests from
stdin and answers on stdout, each a frame: 4 bytes of big-endian length, then UTF-8 JSON. The first frame carries the
template and the limits; every later one asks for renderings of conversations. `sandbox.py` is the other side.

The environment is the one transformers gives chat templates (immutable sandbox, loop controls, `{% generation %}`,
`tojson` that keeps non-ASCII, `raise_exception`, `strftime_now`), with two differences: `strftime_now` answers one
frozen moment, and what jinja2 offers that is random (`lipsum`, `| random`) is absent, because the same data must give
the same tokens.

Bounds: RLIMIT_AS on memory, a counter on output, and SIGALRM on time, whose default action ends this process even when
the parent is gone; the parent's own deadline comes first. Waiting too long for a request ends it too, quietly.
"""

from __future__ import annotations

import io
import json
import math
import re
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO

sys.path.extend(path for path in sys.argv[1:] if path not in sys.path)  # where jinja2 lives: -S found no site-packages

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Json = dict[str, Any]  # frames are JSON; the typed values live on the other side


class OutputLimitError(Exception):
    """A rendering grew beyond the limit."""


class Recorder:
    """How much the rendering under way has written, and which parts of it stood in `{% generation %}` blocks."""

    def __init__(self) -> None:
        self.length = 0
        self.blocks: list[tuple[int, str]] = []

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The blocks as character spans; none at all where one was not written at the place it was recorded at."""
        spans = [(start, start + len(body)) for start, body in self.blocks]
        exact = all(text[start:end] == body for (start, end), (_, body) in zip(spans, self.blocks, strict=True))
        return spans if exact else []


class GenerationExtension(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the class attribute)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.recorder = Recorder()  # of the rendering under way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Macro) -> str:
        body: str = caller()
        self.recorder.blocks.append((self.recorder.length, body))
        return body


class PlainNamespace(Namespace):
    """`namespace()` without underscore names, which lead into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may say namespace(self=...)
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class PlainDict:
    """`dict(...)` and `dict.fromkeys(...)`, without the type that stands behind them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Json:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> Json:
        return dict.fromkeys(*args)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold the private name {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def make_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """What a template finds; `now` is the moment that `strftime_now` tells."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, LoopControls]
    )
    environment.filters["tojson"] = _tojson
    del environment.filters["random"]
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: now.strftime(form),
        namespace=PlainNamespace,
        dict=PlainDict(),
    )
    return environment


class Renderer:
    """One compiled template."""

    def __init__(self, setup: Json) -> None:
        self._environment = make_environment(datetime.fromisoformat(setup["now"]))
        self._extension = self._environment.extensions[GenerationExtension.identifier]
        self._template = self._environment.from_string(setup["source"])
        self._source: str = setup["source"]
        self._output_chars: int = setup["output_chars"]

    def answer(self, request: Json) -> Json:
        """The first rendering in full; each further one as the part that differs from it, usually nothing."""
        whole: str | None = None
        results: list[Json] = []
        spans: list[tuple[int, int]] = []
        for conversation, count, generation_prompt in request["renders"]:
            try:
                chat = request["conversations"][conversation]
                text, found = self._render(chat, count, generation_prompt, request["variables"])
            except _FATAL as error:
                return {"fatal": _describe(error, self._source)}
            except Exception as error:
                results.append({"error": _describe(error, self._source)[1]})
                continue
            if whole is None:
                whole, spans = text, found
                results.append({"common": 0, "tail": text})
            else:
                common = common_length(whole, text)
                results.append({"common": common, "tail": text[common:]})
        return {"results": results, "generation": spans}

    def _render(
        self, chat: Json, count: int, generation_prompt: bool, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        recorder = Recorder()
        self._extension.recorder = recorder  # type: ignore[attr-defined]
        pieces = self._template.generate(
            **variables,
            messages=chat["messages"][:count],
            tools=chat["tools"],
            documents=None,
            add_generation_prompt=generation_prompt,
        )
        text = self._collect(pieces, recorder)
        return text, recorder.spans(text)

    def _collect(self, pieces: Iterator[str], recorder: Recorder) -> str:
        out = io.StringIO()
        for piece in pieces:
            recorder.length += len(piece)
            if recorder.length > self._output_chars:
                raise OutputLimitError(f"it writes more than {self._output_chars:,} characters")
            out.write(piece)
        return out.getvalue()


def common_length(one: str, other: str) -> int:
    """Length of the longest common prefix, by bisection over C-speed comparisons."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_TYPES = ("str", "int", "float", "bool", "list", "dict", "NoneType")
_FATAL = (SecurityError, MemoryError, RecursionError, OutputLimitError)


def _describe(error: Exception, source: str) -> tuple[str, str]:
    """(kind, message) of an error. The message goes to logs, so it may quote the template but never the data."""
    text = str(error)
    quoted = re.findall(r"'([^']*)'", re.sub(r"'[\w.]+( object)?' object", "", text))
    quotes_template_only = all(name in source or name in _TYPES or name.endswith(" object") for name in quoted)
    if isinstance(error, SecurityError):
        return "security", text if quotes_template_only else "it reaches for what a template may not use"
    if isinstance(error, MemoryError):
        return "memory", "it needs more memory than a template may use"
    if isinstance(error, RecursionError):
        return "recursion", "it nests too deeply"
    if isinstance(error, OutputLimitError):
        return "output", str(error)
    if isinstance(error, TemplateSyntaxError):
        return "syntax", f"line {error.lineno}: {error.message}"
    if isinstance(error, TemplateError) and not isinstance(error, UndefinedError):
        public = text in source
    else:
        public = quotes_template_only and isinstance(error, TypeError | UndefinedError)
    return "template", f"{_place(error)}{text if public and text else type(error).__name__}"


def _place(error: Exception) -> str:
    """ "line N: ", where jinja2 knows the line of the template."""
    line = 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == "<template>":
            line = number
    return f"line {line}: " if line else ""


def read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    return stream.read(struct.unpack(">I", header)[0])


def write_frame(stream: BinaryIO, value: Json) -> None:
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(struct.pack(">I", len(body)) + body)
    stream.flush()


def restrict(setup: Json) -> None:
    """Bound this process: memory, no bytes written to any file, no core dump."""
    for limit, value in (
        (resource.RLIMIT_AS, setup["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):  # a system without this limit: the other bounds still hold
            continue


def serve(stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Answer requests until the parent closes the pipe; returns the exit status."""
    first = read_frame(stdin)
    if first is None:
        return 0
    setup: Json = json.loads(first.decode("utf-8", "surrogatepass"))
    restrict(setup)
    try:
        signal.alarm(math.ceil(setup["time_s"]) + 1)
        renderer = Renderer(setup)
    except Exception as error:
        write_frame(stdout, {"fatal": _describe(error, setup["source"])})
        return 1
    write_frame(stdout, {"results": [], "generation": []})
    while True:
        signal.alarm(math.ceil(setup["idle_s"]))
        frame = read_frame(stdin)
        if frame is None:
            return 0
        signal.alarm(math.ceil(setup["time_s"]) + 1)
        try:
            reply = renderer.answer(json.loads(frame.decode("utf-8", "surrogatepass")))
            write_frame(stdout, reply)
        except (MemoryError, RecursionError) as error:
            write_frame(stdout, {"fatal": _describe(error, setup["source"])})


if __name__ == "__main__":
    sys.exit(serve(sys.stdin.buffer, sys.stdout.buffer))
