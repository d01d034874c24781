"""Reading the header of a GGUF file as untrusted input.

The boundary: bytes on disk to plain values; no torch, and the tensors' data is not touched. Little-endian: magic,
version, counts, then key/value pairs, then the table of tensors (name, shape, type, offset), then aligned data. Every
count and length is checked against the bytes that are left before it is believed, so that the libraries which read the
file afterwards meet no lie about sizes. Format: the GGUF specification of ggml, versions 2 and 3. Cost: one walk over
the header, about 0.3 s for a vocabulary of 49 thousand tokens.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muxtune.errors import ModelError

Scalar = str | int | float | bool

_FIXED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_PAIRS, _MAX_TENSORS, _MAX_DIMS = 4096, 1 << 16, 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # as ggml orders it, the fastest dimension first
    type_name: str  # F32, Q4_1, ...
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata` holds the scalars (a float32 as its shortest decimal: 1e-05, not 9.9999997e-06); `array_lengths`
    the number of entries of each array, such as the vocabulary."""

    path: Path
    metadata: Mapping[str, Scalar]
    array_lengths: Mapping[str, int]
    tensors: tuple[GgufTensor, ...]

    def text(self, key: str) -> str:
        """The string at `key`, or "" where there is none."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""


def read_header(path: Path) -> GgufHeader:
    """Raises ModelError for anything but a whole GGUF file of version 2 or 3."""
    if path.stat().st_size < 24:
        raise _damaged(path, "it is too short")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(path, data).header()


class _Cursor:
    """A place in the file that never moves beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ModelError("not a GGUF file", where=str(self._path))
        version, tensor_count, pair_count = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version} is not read, only 2 and 3", where=str(self._path))
        if tensor_count > _MAX_TENSORS or pair_count > _MAX_PAIRS:
            raise _damaged(self._path, f"it claims {tensor_count} tensors and {pair_count} keys")
        metadata: dict[str, Scalar] = {}
        array_lengths: dict[str, int] = {}
        for _ in range(pair_count):
            key, kind = self._string(), self._number("<I")
            if kind == _ARRAY:
                array_lengths[key] = self._skip_array(key)
            else:
                metadata[key] = self._scalar(key, kind)
        tensors = self._tensors(tensor_count, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return GgufHeader(self._path, metadata, array_lengths, tensors)

    def _tensors(self, count: int, alignment: Scalar) -> tuple[GgufTensor, ...]:
        if not isinstance(alignment, int) or alignment < 1:
            raise _damaged(self._path, f"its alignment is {alignment!r}")
        table = [self._tensor() for _ in range(count)]
        data_start = -(-self._at // alignment) * alignment
        if len({tensor.name for tensor, _ in table}) != len(table):
            raise _damaged(self._path, "two tensors have one name")
        for tensor, offset in table:
            if data_start + offset + tensor.size_bytes > len(self._data):
                raise _damaged(self._path, f"tensor {tensor.name} ends beyond the end of the file")
        return tuple(tensor for tensor, _ in table)

    def _tensor(self) -> tuple[GgufTensor, int]:
        name, dims = self._string(), self._number("<I")
        if dims > _MAX_DIMS:
            raise _damaged(self._path, f"tensor {name} has {dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dims))
        type_name, size_bytes = _size(self._path, name, self._number("<I"), shape)
        return GgufTensor(name, shape, type_name, size_bytes), self._number("<Q")

    def _scalar(self, key: str, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        if kind not in _FIXED:
            raise _damaged(self._path, f"key {key} has the unknown type {kind}")
        value: Scalar = struct.unpack(_FIXED[kind], self._bytes(struct.calcsize(_FIXED[kind])))[0]
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _skip_array(self, key: str) -> int:
        kind, count = self._number("<I"), self._number("<Q")
        if kind in _FIXED:
            self._skip(count * struct.calcsize(_FIXED[kind]))
        elif kind == _STRING:
            for _ in range(count):  # ends at the latest at the end of the file: each entry takes 8 bytes or more
                self._skip(self._number("<Q"))
        else:
            raise _damaged(self._path, f"key {key} is an array of the unknown type {kind}")
        return count

    def _string(self) -> str:
        try:
            return self._bytes(self._number("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self._path, "a name in it is not UTF-8") from None

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise _damaged(self._path, "its header ends beyond the end of the file")
        self._at += count


def _size(path: Path, name: str, kind: int, shape: tuple[int, ...]) -> tuple[str, int]:
    """The name of a ggml type and the bytes that a tensor of this shape takes in it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_items, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelError(f"tensor {name} has the unknown type {kind}", where=str(path)) from None
    if shape and shape[0] % block_items:
        raise _damaged(path, f"a row of tensor {name} is no whole number of blocks")
    return GGMLQuantizationType(kind).name, math.prod(shape) // block_items * block_bytes


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"truncated or damaged GGUF file: {what}", where=str(path), hint="copy or download it again")
