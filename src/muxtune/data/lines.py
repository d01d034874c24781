"""A data file's bytes -> numbered JSON values, in bounded memory.

A `.jsonl` file (any name but `.json`, in fact) holds one value per line of at most 8 MiB; longer lines are skipped over
without being held. A `.json` file may instead hold one array, which is read whole. A digest is fed the very bytes that
are parsed, so what is later stored under it cannot belong to another version of the file.

Boundary: local regular files only; nothing is downloaded or decompressed. What is wrong with a line comes out in place
of its value, so that one bad line does not hide the next.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from muxtune.data.problems import LineError, clip
from muxtune.data.strict_json import parse, parse_at
from muxtune.errors import DataError

MAX_LINE_BYTES = 8 << 20
MAX_ARRAY_BYTES = 1 << 30
UNKNOWN = -1
BOM = b"\xef\xbb\xbf"
FOREIGN = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Line:
    """A JSON value or what was wrong with it; `number` is the line it starts at, `size` its characters or bytes."""

    number: int
    value: object | LineError
    clip: str
    size: int


def read_lines(path: str, digest: Digest) -> Iterator[Line]:
    """The values of a file, blank lines skipped. Raises DataError where the file cannot be text at all."""
    with open_regular(path) as file:
        head = file.read(4096)
        file.seek(0)
        for magic, name in FOREIGN.items():
            if head.startswith(magic):
                raise DataError(f"the file is {name}, expected UTF-8 text with one JSON object per line", where=path)
        starts_array = head.removeprefix(BOM).lstrip().startswith(b"[")
        if starts_array and path.lower().endswith(".json"):
            yield from _array(_read_whole(file, path, digest))
        else:
            yield from _lines(file, digest)
        _drain(file, digest)


def file_sha256(path: str) -> str:
    """The digest that reading this file would end with."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        _drain(file, digest)
    return digest.hexdigest()


def open_regular(path: str) -> BinaryIO:
    """Opens a local regular file: never a pipe or a device, which could block or never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        hint = "data is read from local files; paths in a config are relative to the config file"
        raise DataError("no such file", where=path, hint=hint) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from None
    except ValueError:
        raise DataError("not a usable path", where=ascii(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError("not a regular file", where=path)
    return os.fdopen(descriptor, "rb")


def _lines(file: BinaryIO, digest: Digest) -> Iterator[Line]:
    first = True
    for number, raw in enumerate(_bounded_lines(file, digest), start=1):
        if not raw.strip():
            continue
        if first and raw.lstrip().startswith(b"["):
            message = f"file is a JSON array, expected one object per line (line {number})"
            yield Line(number, LineError("json_array", message), clip(raw), len(raw))
            return  # the lines that follow are pieces of the array, not mistakes of their own
        first = False
        try:
            value: object | LineError = _parse_line(raw)
        except LineError as refused:
            value = refused
        yield Line(number, value, clip(raw), len(raw))


def _parse_line(raw: bytes) -> object:
    if len(raw) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if raw.lstrip().startswith(b"["):
        raise LineError("json_array", "line is a JSON array, expected one object per line")
    try:
        return parse(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError("not_utf8", f"not UTF-8: byte {error.start + 1} of the line") from None


def _bounded_lines(file: BinaryIO, digest: Digest) -> Iterator[bytes]:
    """Lines, without a byte order mark; of one over the cap the first MAX_LINE_BYTES + 1 bytes, the rest skipped."""
    first = True
    while raw := file.readline(MAX_LINE_BYTES + 1):
        digest.update(raw)
        rest = raw
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
            digest.update(rest)
        yield raw.removeprefix(BOM) if first else raw
        first = False


def _read_whole(file: BinaryIO, path: str, digest: Digest) -> bytes:
    data = file.read(MAX_ARRAY_BYTES + 1)
    digest.update(data)
    if len(data) > MAX_ARRAY_BYTES:
        raise DataError("the JSON array is larger than 1 GiB", where=path, hint="write one object per line (.jsonl)")
    return data


def _array(data: bytes) -> Iterator[Line]:
    """The elements of an array. Where it is broken, one Line says so and is the last: what follows has no start."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        broken = LineError("not_utf8", f"not UTF-8: byte {error.start + 1} of the file")
        yield Line(data.count(b"\n", 0, error.start) + 1, broken, "", 0)
        return
    number, counted = 1, 0
    at = _skip_blank(text, text.index("[") + 1)
    more = not text.startswith("]", at)
    while more:
        number, counted = number + text.count("\n", counted, at), at
        value, end = _element(text, at)
        yield Line(number, value, clip(text[at : at + 400]), end - at)
        if end == UNKNOWN:
            return
        at = _skip_blank(text, end)
        more = text.startswith(",", at)
        at = _skip_blank(text, at + 1) if more else at
    if text[at:].rstrip() != "]":
        number += text.count("\n", counted, at)
        broken = LineError("not_json", "not JSON: the array does not go on with `,` nor end with `]` here")
        yield Line(number, broken, clip(text[at : at + 400]), 0)


def _element(text: str, at: int) -> tuple[object | LineError, int]:
    """The value that begins at `at`, and where it ends: UNKNOWN where it cannot be parsed."""
    try:
        value, end = parse_at(text, at)
    except LineError as refused:
        return refused, UNKNOWN
    if end - at > MAX_LINE_BYTES:
        return LineError("line_too_long", f"the object is longer than {MAX_LINE_BYTES >> 20} MiB"), end
    return value, end


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _drain(file: BinaryIO, digest: Digest) -> None:
    while block := file.read(1 << 20):
        digest.update(block)
