"""The model cache: folders that are built once, and digests that are computed once.

    <cache>/models/<key>/        a converted model in Hugging Face layout, with its receipt (muxtune.json)
    <cache>/models/.<key>.lock   held while <key> is built
    <cache>/hub/                 what huggingface_hub downloads, in its own layout
    <cache>/digests/             SHA-256 of files of the user's, kept by path, size, inode and time of change

The boundary: bytes, names and locks; nothing here knows of models. A folder is built beside its place, fsynced and
renamed, so it is whole or absent whenever a process dies; a receipt with the size of every file tells a whole folder
from one that somebody cut afterwards. Of several processes that want the same folder one builds and the others wait:
the lock is the kernel's (flock), so a killed builder frees it. The cache is private to its user (mode 0700).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from muxtune.durable import staged_folder, write_durably
from muxtune.errors import ConfigError, ModelError

RECEIPT = "muxtune.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a folder's weights come from. `note` says what was done to them ("dequantised Q4_1"); may be empty."""

    public_name: str
    note: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a built folder holds: its origin, and the name and size in bytes of each file."""

    origin: Origin
    files: tuple[tuple[str, int], ...]


def default_cache_dir() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/muxtune`; a relative XDG_CACHE_HOME is ignored, as its specification asks.

    Raises ConfigError for a user without a home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "muxtune"
    try:
        return Path.home() / ".cache" / "muxtune"
    except RuntimeError:
        hint = "set HOME, or XDG_CACHE_HOME, to a folder that can be written"
        raise ConfigError("there is no home folder to keep the model cache in", where="HOME", hint=hint) from None


def private_folder(path: Path) -> Path:
    """`path`, made with its parents where it is not there, for the eyes of its user only."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def build_once(cache_dir: Path, key: str, build: Callable[[Path], Origin]) -> Path:
    """The folder `key` of the cache, made by `build(empty folder)` where it is not there or no longer whole.

    Raises ModelError where the disk does not take it, and whatever `build` raises; either leaves nothing behind.
    """
    private_folder(cache_dir)
    models = private_folder(cache_dir / "models")
    dest = models / key
    if read_receipt(dest) is not None:
        return dest
    try:
        with FileLock(models / f".{key}.lock", mode=0o600):
            if read_receipt(dest) is None:
                _sweep(models, key)
                _build(dest, build)
    except OSError as error:
        hint = "free some space, or set XDG_CACHE_HOME to a folder that can be written"
        raise ModelError(f"cannot write the model cache: {error}", where=str(dest), hint=hint) from error
    return dest


def read_receipt(folder: Path) -> Receipt | None:
    """The receipt of a folder that is whole: there, well formed, and every file of the size it says; else None."""
    try:
        receipt = _parse(json.loads((folder / RECEIPT).read_bytes()))
        whole = all((folder / name).stat().st_size == size_bytes for name, size_bytes in receipt.files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return receipt if whole else None


def write_receipt(folder: Path, origin: Origin) -> None:
    """Put the receipt of a flat folder's present files into it."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    text = json.dumps({"format": 1, **asdict(origin), "files": files}, indent=2)
    (folder / RECEIPT).write_text(text + "\n", encoding="utf-8")


def remembered_digest(cache_dir: Path, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """`compute()`, or what it said last time if no file has changed since (path, size, inode, time of change).

    A cache that cannot be written costs the time to compute again, nothing else.
    """
    stamp = _stamp(files)
    slot = cache_dir / "digests" / f"{hashlib.sha256(repr([path for path, *_ in stamp]).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(slot.read_bytes())
        if record["stamp"] == stamp:
            return str(record["digest"])
    digest = compute()
    if _stamp(files) == stamp:
        with contextlib.suppress(OSError):
            private_folder(cache_dir)
            private_folder(slot.parent)
            write_durably(slot, json.dumps({"stamp": stamp, "digest": digest}).encode())
    return digest


def file_sha256(path: Path) -> str:
    """Streaming SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(dest: Path, build: Callable[[Path], Origin]) -> None:
    _log.info("preparing %s (once)", dest.name)
    with staged_folder(dest, key_file=RECEIPT) as staging:
        write_receipt(staging, build(staging))


def _sweep(models: Path, key: str) -> None:
    """Under the lock: what a killed builder left, and a folder that is no longer whole."""
    for left in models.glob(f".{key}.*.staged"):
        shutil.rmtree(left)
    dest = models / key
    if dest.exists():
        _log.warning("%s is damaged and will be made again", dest)
        (dest / RECEIPT).unlink(missing_ok=True)
        shutil.rmtree(dest)


def _parse(record: dict[str, object]) -> Receipt:
    files = record["files"]
    if record["format"] != 1 or not isinstance(files, dict) or not files:
        raise ValueError("not a receipt of this format")
    if any(Path(name).name != name for name in files):
        raise ValueError("a file outside the folder")
    origin = Origin(str(record["public_name"]), str(record["note"]), str(record["weights_sha256"]))
    return Receipt(origin, tuple((str(name), int(size)) for name, size in files.items()))


def _stamp(files: Sequence[Path]) -> list[list[object]]:
    stats = [(path.resolve(), path.stat()) for path in files]
    return [[str(path), stat.st_size, stat.st_ino, stat.st_mtime_ns] for path, stat in stats]
