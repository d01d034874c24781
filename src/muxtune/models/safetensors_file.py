"""Reading a safetensors file as untrusted input, and hashing the weights of a model.

The boundary: bytes on disk, no torch. A file is 8 bytes of header length (little-endian), a JSON header of
{name: {dtype, shape, data_offsets}}, then the data. Everything the header claims is checked against the file's size
before anybody allocates or maps by it: its length (capped), shapes against offsets, and offsets that tile the data
without gap or overlap. The `safetensors` library then loads the file. Cost of a check: one read of the header.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from muxtune.errors import ModelError

MAX_HEADER_BYTES = 32 << 20  # a header takes about 100 bytes a tensor; the library itself would take 100 MB
_READ_BYTES = 8 << 20

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes [start, end) of `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class WeightsHash:
    """SHA-256 over tensors in name order. Of each: name, dtype, shape, then its bytes (little-endian, row-major).

    Name, dtype and shape go in as the UTF-8 line `name dtype d0,d1,...\\n`, so no two models share a byte stream.
    How tensors are spread over files does not matter.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._last = ""

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        assert name > self._last, f"{name} after {self._last}: the hash is defined in name order"
        self._last = name
        self._sha.update(f"{name} {dtype} {','.join(map(str, shape))}\n".encode())

    def update(self, data: bytes | memoryview) -> None:
        self._sha.update(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def read_entries(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors file. Raises ModelError where the header and the file do not fit each other."""
    header, data_start, size = _read_header(path)
    entries = [_entry(path, name, value, data_start) for name, value in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = data_start
    for entry in entries:
        if entry.start != position:
            raise ModelError(f"tensor {entry.name} leaves a gap or overlaps another", where=str(path))
        position = entry.end
    if position != size:
        what = "truncated" if position > size else "longer than its tensors"
        raise ModelError(
            f"the file is {what}: its header describes {position} bytes, it has {size}",
            where=str(path),
            hint="copy or download it again",
        )
    return tuple(entries)


def hash_entries(entries: Iterable[TensorEntry]) -> str:
    """The `WeightsHash` of tensors on disk, streamed: costs one read of the files."""
    digest = WeightsHash()
    for entry in sorted(entries, key=lambda entry: entry.name):
        digest.begin(entry.name, entry.dtype, entry.shape)
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            left = entry.end - entry.start
            while left:
                block = file.read(min(left, _READ_BYTES))
                if not block:
                    raise ModelError("the file shrank while it was read", where=str(entry.file))
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def _read_header(path: Path) -> tuple[dict[str, object], int, int]:
    """(header, where the data begins, size of the file)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ModelError("not a safetensors file, or a truncated one", where=str(path), hint="copy it again")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ModelError("the safetensors header is not JSON", where=str(path)) from None
    if not isinstance(header, dict):
        raise ModelError("the safetensors header is not a JSON object", where=str(path))
    return header, 8 + length, size


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise ModelError(f"tensor {name!r} is not described as safetensors asks", where=str(path))
    if dtype not in ITEM_BYTES:
        raise ModelError(f"tensor {name!r} has the unknown type {dtype!r}", where=str(path))
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ModelError(f"tensor {name!r} has a shape that is no list of sizes", where=str(path))
    if start < 0 or end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelError(f"the shape of tensor {name!r} does not fit its bytes", where=str(path))
    return TensorEntry(path, name, dtype, tuple(shape), data_start + start, data_start + end)
