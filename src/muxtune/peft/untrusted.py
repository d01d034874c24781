"""Reads JSON and safetensors files that a stranger wrote.

The boundary: only containers - size, header, dtypes, layout of bytes; what the tensors mean is `convert.py`'s business.
Each file is opened once, without following a link, and read under a bound; nothing is allocated for a tensor before
the caller has seen every name, dtype and shape (`SafetensorsFile.tensors`) and asked for the data (`load`). Nothing is
ever unpickled: there is no code path here that could.
Cost: the header is parsed twice (here, and by the safetensors library when the data is read).
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
from safetensors.torch import load as parse_safetensors

from muxtune.data import strict_json
from muxtune.data.manifest import JsonValue
from muxtune.data.problems import LineError
from muxtune.errors import AdapterError

MAX_JSON_BYTES = 4 << 20
MAX_HEADER_BYTES = 8 << 20  # a header of 100 layers with 7 targets is 0.2 MB

JsonObject: TypeAlias = Mapping[str, JsonValue]

# Bytes per element of all dtypes that may lie in a file; which of them an adapter may use is the importer's decision.
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header; `start` and `end` are offsets into the data that follows the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An opened safetensors file whose header has been checked and whose data has not been read.

    Raises:
        AdapterError: the file is a link, not a regular file, or its header does not describe exactly its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_regular(path)
        try:
            self.tensors: Mapping[str, TensorInfo] = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def load(self) -> dict[str, torch.Tensor]:
        """Every tensor, as it is in the file. The caller has judged names, dtypes and shapes by now."""
        self._file.seek(0)
        data = self._file.read(self._size_bytes)
        try:
            tensors: dict[str, torch.Tensor] = parse_safetensors(data)
        except Exception as error:  # the library's own exception class is not public
            raise self._damaged(f"safetensors refuses it: {error}") from error
        if {name: tuple(t.shape) for name, t in tensors.items()} != {n: i.shape for n, i in self.tensors.items()}:
            raise self._damaged("it changed while it was read")
        return tensors

    def _read_header(self) -> dict[str, TensorInfo]:
        self._size_bytes = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > self._size_bytes - 8:
            raise self._damaged(f"its header claims {header_bytes} bytes, the file has {self._size_bytes}")
        if header_bytes > MAX_HEADER_BYTES:
            raise self._damaged(f"its header is larger than {MAX_HEADER_BYTES} bytes")
        header = _parse_json(self._file.read(header_bytes), str(self.path))
        tensors = {name: self._entry(name, entry) for name, entry in header.items() if name != "__metadata__"}
        self._check_tiling(tensors, self._size_bytes - 8 - header_bytes)
        return tensors

    def _entry(self, name: str, entry: JsonValue) -> TensorInfo:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"the header entry of {name!r} is malformed")
        dtype, shape, offsets = entry["dtype"], _sizes(entry["shape"]), _sizes(entry["data_offsets"])
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise self._damaged(f"{name!r} has the unknown dtype {dtype!r}")
        if shape is None or offsets is None or len(offsets) != 2:
            raise self._damaged(f"the shape or offsets of {name!r} are malformed")
        if offsets[1] - offsets[0] != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise self._damaged(f"the bytes of {name!r} do not hold {dtype} {list(shape)}")
        return TensorInfo(dtype, shape, offsets[0], offsets[1])

    def _check_tiling(self, tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
        at = 0
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
            if info.start != at:
                raise self._damaged(f"the data of {name!r} overlaps or leaves a hole")
            at = info.end
        if at != data_bytes:
            raise self._damaged(f"its tensors hold {at} bytes, the file has {data_bytes}")

    def _damaged(self, reason: str) -> AdapterError:
        return AdapterError(f"not a sound safetensors file: {reason}", where=str(self.path), hint="save it again")


def read_json(path: Path) -> JsonObject:
    """The JSON object in `path`.

    Raises:
        AdapterError: a link, too large, not UTF-8, not one object, a key twice, NaN or Infinity, too deep.
    """
    with _open_regular(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise AdapterError(f"larger than {MAX_JSON_BYTES} bytes", where=str(path), hint="no such file is this large")
    return _parse_json(data, str(path))


def _parse_json(data: bytes, where: str) -> JsonObject:
    try:
        value = strict_json.parse(data.decode())
    except (UnicodeDecodeError, LineError) as error:
        raise AdapterError(f"not sound JSON: {error}", where=where, hint="save the adapter again") from error
    if not isinstance(value, dict):
        raise AdapterError("not a JSON object", where=where, hint="save the adapter again")
    return value


def _sizes(value: JsonValue) -> tuple[int, ...] | None:
    """A list of non-negative integers as a tuple, None for anything else."""
    if not isinstance(value, list):
        return None
    sound = all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
    return tuple(value) if sound else None


def _open_regular(path: Path) -> BinaryIO:
    """Open for reading without following a link at `path` and without waiting on a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise AdapterError("a symbolic link", where=str(path), hint="copy the file itself into the folder")
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise AdapterError(f"cannot be opened: {error.strerror}", where=str(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AdapterError("not a regular file", where=str(path), hint="an adapter folder holds plain files only")
    return os.fdopen(fd, "rb")
