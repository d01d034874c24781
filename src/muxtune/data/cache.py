"""Token tables on disk, keyed by content.

An entry is one file named by the SHA-256 of everything that decides its content: the data file's bytes, the declared
shape, the renderer (tokenizer, template, settings), and the code of this package - so an entry can be absent, never
stale. The file is a SHA-256 followed by safetensors; an entry that fails its digest is deleted and made anew.

Private to the user (folder 0700, files 0600; a folder of someone else is not used). Written beside and renamed, so that
two processes may make the same entry: both write the same bytes. At most `limit_bytes` are kept, the least recently
used go first. A cache that cannot be read or written costs time, never a run: it warns by path, and goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import cast

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from muxtune.data.tokens import TokenizedFile, TokenTable
from muxtune.data.types import Shape

DIGEST_BYTES = 32
DEFAULT_LIMIT_BYTES = 4 << 30
ABANDONED_S = 3600
_LOG = logging.getLogger(__name__)


def cache_key(*, file_sha256: str, declared: Shape | None, renderer: str) -> str:
    """The name of an entry. `renderer` is the renderer's fingerprint."""
    parts = {"file": file_sha256, "declared": declared, "renderer": renderer, "code": _code_fingerprint()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class TokenCache:
    """Entries of one folder, which is made when first written to."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def load(self, key: str) -> TokenizedFile | None:
        """The entry, or None where there is none that is whole."""
        path = self._path(key)
        try:
            if not self._is_ours():
                return None
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("token cache %s cannot be read: %s", path, error.strerror)
            return None
        entry = _decode(data)
        if entry is None:
            _LOG.warning("token cache %s is damaged and is made anew", path)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return entry

    def store(self, key: str, file: TokenizedFile) -> None:
        """Keeps an entry, unless it alone is over the limit."""
        data = _encode(file)
        if len(data) > self.limit_bytes:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                _LOG.warning("token cache %s belongs to another user and is not used", self.folder)
                return
            self.folder.chmod(0o700)
            self._write(self._path(key), data)
            self._evict(keep=self._path(key))
        except OSError as error:
            _LOG.warning("token cache %s cannot be written: %s", self.folder, error.strerror)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.tokens"

    def _is_ours(self) -> bool:
        found = os.stat(self.folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()

    def _write(self, path: Path, data: bytes) -> None:
        descriptor, beside = tempfile.mkstemp(dir=self.folder, suffix=".part")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise

    def _evict(self, keep: Path) -> None:
        """Deletes what a killed writer left, then the least recently used entries above the limit."""
        for left in self.folder.glob("*.part"):
            if time.time() - _modified_s(left) > ABANDONED_S:
                left.unlink(missing_ok=True)
        entries = sorted(self.folder.glob("*.tokens"), key=_modified_s, reverse=True)
        entries.sort(key=lambda path: path != keep)
        held = 0
        for path in entries:
            held += _size_bytes(path)
            if held > self.limit_bytes:
                path.unlink(missing_ok=True)


def _encode(file: TokenizedFile) -> bytes:
    table = file.table
    about = json.dumps({"shape": file.shape, "sha256": file.sha256, "system": file.system})
    tensors = {"ids": table.ids, "mask": table.mask, "starts": table.starts, "lines": table.lines}
    tensors["about"] = np.frombuffer(about.encode(), dtype=np.uint8)
    body: bytes = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    return hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> TokenizedFile | None:
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    try:
        arrays = safetensors.numpy.load(body)
        about = json.loads(arrays["about"].tobytes())
        table = TokenTable(arrays["ids"], arrays["mask"], arrays["starts"], arrays["lines"])
        return TokenizedFile(table, cast("Shape", about["shape"]), about["sha256"], about["system"])
    except (SafetensorError, KeyError, ValueError):
        return None


@cache
def _code_fingerprint() -> str:
    """Of the code that turns bytes into tokens: an entry made by another version of it is simply not found."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for package in ("tokenizers", "jinja2"):
        digest.update(f"{package}={version(package)}".encode())
    return digest.hexdigest()


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just evicted it
        return 0.0


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
