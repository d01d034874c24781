"""Files that are whole or absent, whenever the process dies.

The boundary: bytes and paths only; what is in the files is the caller's business. Written beside, fsynced, renamed:
a reader, or a process that starts after a crash, sees the old file or the new one and never a part. Costs one fsync
a file and one a folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def staged_folder(dest: Path, *, key_file: str) -> Iterator[Path]:
    """A flat folder to fill; its files appear at `dest` when the block ends well, and nothing does when it raises.

    A `dest` that is not there appears in one rename. One that exists (a run's folder) keeps its other files; the new
    ones are moved in one by one while `key_file`, without which a reader takes the folder for incomplete, is absent:
    it goes first and comes last, so old and new files are never read together.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(dest)
    staging.mkdir()
    try:
        yield staging
        files = sorted(staging.iterdir())
        for file in files:
            sync(file)
        sync(staging)
        if dest.exists():
            _move_into(dest, files, key_file)
        else:
            os.rename(staging, dest)
            sync(dest.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.staged"
