"""Files of a user's cache: whole, private, bounded, and never in the way.

An entry is a file named by its key: the SHA-256 of its body, then the body. One that fails its digest, or that its
`decode` does not know, is deleted and made anew.

Private to the user (folder 0700, files 0600; a folder of someone else is not used). Written beside and renamed, so that
two processes may make the same entry. At most `limit_bytes` are kept, the least recently used go first. A cache that
cannot be read or written costs time, never a run: it warns by path, and goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

DIGEST_BYTES = 32
ABANDONED_S = 3600
_LOG = logging.getLogger(__name__)
_Entry = TypeVar("_Entry")


class PrivateCache(ABC, Generic[_Entry]):
    """Entries of one folder, which is made when first written to. A subclass says what an entry is."""

    what: str  # its name in warnings
    suffix: str  # of its files

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    @abstractmethod
    def encode(self, entry: _Entry) -> bytes:
        """The body of an entry's file."""

    @abstractmethod
    def decode(self, body: bytes) -> _Entry | None:
        """The entry of a body that is what was written; None where another version wrote it."""

    def load(self, key: str) -> _Entry | None:
        """The entry, or None where there is none that is whole."""
        path = self._path(key)
        try:
            if not self._is_ours():
                return None
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("%s %s cannot be read: %s", self.what, path, error.strerror)
            return None
        with contextlib.suppress(OSError):  # on a read-only disk nothing is evicted either
            os.utime(path)
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        entry = self.decode(body) if hashlib.sha256(body).digest() == digest else None
        if entry is None:
            _LOG.warning("%s %s is damaged and is made anew", self.what, path)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return entry

    def store(self, key: str, entry: _Entry) -> bool:
        """Keeps an entry, unless it alone is over the limit; whether it is kept."""
        body = self.encode(entry)
        if DIGEST_BYTES + len(body) > self.limit_bytes:
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                _LOG.warning("%s %s belongs to another user and is not used", self.what, self.folder)
                return False
            self.folder.chmod(0o700)
            self._write(self._path(key), hashlib.sha256(body).digest() + body)
            self._evict(keep=self._path(key))
        except OSError as error:
            _LOG.warning("%s %s cannot be written: %s", self.what, self.folder, error.strerror)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{self.suffix}"

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
        entries = sorted(self.folder.glob(f"*{self.suffix}"), key=_modified_s, reverse=True)
        entries.sort(key=lambda path: path != keep)
        held = 0
        for path in entries:
            held += _size_bytes(path)
            if held > self.limit_bytes:
                path.unlink(missing_ok=True)


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
