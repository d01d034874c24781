"""A folder of the cache is whole or absent: two builders at once, a kill at any moment, damage afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muxtune.errors import ConfigError, ModelError
from muxtune.models.cache import (
    RECEIPT,
    Origin,
    build_once,
    default_cache_dir,
    file_sha256,
    read_receipt,
    remembered_digest,
)

ORIGIN = Origin("someone/tiny", "made up", "0" * 64)


def build(dest: Path) -> Origin:
    (dest / "a.json").write_text("{}")
    (dest / "model.safetensors").write_bytes(b"x" * 1000)
    return ORIGIN


def test_the_cache_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "muxtune"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "muxtune"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        default_cache_dir()


def test_a_folder_is_built_once_and_for_its_user_only(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = build_once(cache, "m", build)
    receipt = read_receipt(folder)
    assert receipt is not None and receipt.origin == ORIGIN
    assert dict(receipt.files) == {"a.json": 2, "model.safetensors": 1000}
    assert (cache.stat().st_mode & 0o777, (cache / "models").stat().st_mode & 0o777) == (0o700, 0o700)

    def never(dest: Path) -> Origin:
        raise AssertionError("it was there")

    assert build_once(cache, "m", never) == folder


@pytest.mark.parametrize("damage", ["shorter", "missing", "no receipt", "bad receipt"])
def test_a_damaged_folder_is_built_again(damage: str, tmp_path: Path) -> None:
    folder = build_once(tmp_path, "m", build)
    if damage == "shorter":
        (folder / "model.safetensors").write_bytes(b"x" * 999)
    elif damage == "missing":
        (folder / "a.json").unlink()
    elif damage == "no receipt":
        (folder / RECEIPT).unlink()
    else:
        (folder / RECEIPT).write_text('{"format": 1, "files": {"../m/a.json": 2}}')
    assert read_receipt(folder) is None
    build_once(tmp_path, "m", build)
    assert read_receipt(folder) is not None
    assert (folder / "model.safetensors").stat().st_size == 1000


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails(dest: Path) -> Origin:
        build(dest)
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_once(tmp_path, "m", fails)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]


def test_a_disk_that_refuses_is_a_model_error(tmp_path: Path) -> None:
    def full(dest: Path) -> Origin:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left.*XDG_CACHE_HOME"):
        build_once(tmp_path, "m", full)


CHILD = """
import os, signal, sys
from pathlib import Path
from muxtune import durable
from muxtune.models import cache
from tests.models.test_cache import build

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def build_half(dest):
    (dest / "model.safetensors").write_bytes(b"x" * 500)
    die()

moment = sys.argv[2]
if moment == "files written":
    cache.write_receipt = die
elif moment == "receipt written":
    durable.sync = die
elif moment == "before the rename":
    durable.os.rename = die
cache.build_once(Path(sys.argv[1]), "m", build_half if moment == "half a file" else build)
"""


@pytest.mark.parametrize("moment", ["half a file", "files written", "receipt written", "before the rename"])
def test_a_builder_killed_at_any_moment_leaves_no_folder_that_counts(moment: str, tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), moment], check=False)
    assert child.returncode == -signal.SIGKILL
    assert read_receipt(tmp_path / "models" / "m") is None
    assert any(path.name.endswith(".staged") for path in (tmp_path / "models").iterdir())
    folder = build_once(tmp_path, "m", build)  # neither blocked by the dead one's lock nor misled by what it left
    assert read_receipt(folder) is not None
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".m.lock", "m"]


def test_a_digest_is_computed_again_only_when_a_file_changed(tmp_path: Path) -> None:
    file, calls = tmp_path / "w", []

    def compute() -> str:
        calls.append(1)
        return file_sha256(file)

    file.write_bytes(b"one")
    first = remembered_digest(tmp_path / "cache", [file], compute)
    assert remembered_digest(tmp_path / "cache", [file], compute) == first
    assert len(calls) == 1
    file.write_bytes(b"two")  # same size
    os.utime(file, ns=(1, 2))
    assert remembered_digest(tmp_path / "cache", [file], compute) == file_sha256(file) != first
    assert len(calls) == 2


def test_a_damaged_record_or_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(b"one")
    digest = remembered_digest(tmp_path / "cache", [file], lambda: file_sha256(file))
    for record in (tmp_path / "cache" / "digests").iterdir():
        record.write_text('{"stamp": ')
    assert remembered_digest(tmp_path / "cache", [file], lambda: file_sha256(file)) == digest
    (tmp_path / "no folder").write_text("")
    assert remembered_digest(tmp_path / "no folder", [file], lambda: file_sha256(file)) == digest
