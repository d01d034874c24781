"""Files that are whole or absent, whenever the process dies.

The boundary: bytes and paths only; what is in the files is the caller's business. Written beside, fsynced, renamed:
a reader, or a process that starts after a crash, sees the old file or the new one and never a part. What a killed
writer leaves has a name that `is_staged` knows and `sweep` removes. Costs one fsync a file and one a folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STAGED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.staged")


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by a file that holds exactly `data`."""
    staged = _beside(path)
    try:
        with open(staged, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Text in UTF-8, for people and other programs: what UTF-8 has no bytes for - file names may be in any encoding -
    becomes a question mark."""
    path.write_text(text, encoding="utf-8", errors="replace")


@contextmanager
def staged_folder(dest: Path, *, key_file: str) -> Iterator[Path]:
    """A flat folder to fill; its files appear at `dest` when the block ends well, and nothing does when it raises.

    A `dest` that is not there appears in one rename. One that exists (a run's folder) keeps its other files; the new
    ones are moved in one by one while `key_file`, without which a reader takes the folder for incomplete, is absent:
    it goes first and comes last, so old and new files are never read together.
    """
    make_folder(dest.parent)
    staging = _beside(dest)
    staging.mkdir()
    try:
        yield staging
        files = sorted(staging.iterdir())
        mode = staging.stat().st_mode & 0o666  # as the umask says; safetensors makes its files for the owner alone
        for file in files:
            file.chmod(mode)
            sync(file)
        sync(staging)
        if dest.exists():
            _move_into(dest, files, key_file)
        else:
            os.rename(staging, dest)
            sync(dest.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that are still there after a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def try_folder(path: Path) -> None:
    """Raises OSError where no folder could be made at `path`, or nothing written into the one there; leaves nothing."""
    there = next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), path)
    trial = _beside(there / "trial")
    trial.mkdir()
    with suppress(FileNotFoundError):  # swept by a run that has begun just now
        trial.rmdir()


def discard(path: Path) -> None:
    """Remove a folder, if it is there; whenever this process dies, a reader finds it whole or not at all."""
    doomed = _beside(path)
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    sync(path.parent)
    _remove(doomed)


def is_staged(path: Path) -> bool:
    """Whether `path` is something half-written, or half-removed, of this module."""
    return _STAGED.fullmatch(path.name) is not None


def sweep(folder: Path) -> None:
    """Remove from `folder` what killed writers left. The caller sees to it that no writer is at work there."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if is_staged(path):
            _remove(path)


def sync(path: Path) -> None:
    """fsync a file or a folder (a folder's fsync makes renames in it last)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_into(dest: Path, files: list[Path], key_file: str) -> None:
    (dest / key_file).unlink(missing_ok=True)
    sync(dest)
    for file in sorted(files, key=lambda file: file.name == key_file):
        os.replace(file, dest / file.name)
    sync(dest)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.staged"
