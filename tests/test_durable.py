"""Files are whole or absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from muxtune import durable
from muxtune.durable import discard, is_staged, make_folder, staged_folder, sweep, write_durably


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"one")
    write_durably(tmp_path / "a", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"two"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_durably(tmp_path / "a", b"one")

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_durably(tmp_path / "a", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"one"


def test_data_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that survives a power cut: fsync of the data, rename, fsync of the folder."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd, real=os.fsync: (calls.append("fsync"), real(fd)))
    for name in ("replace", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda a, b, real=real: (calls.append("move"), real(a, b)))
    write_durably(tmp_path / "a", b"one")
    assert calls == ["fsync", "move", "fsync"]
    calls.clear()
    with staged_folder(tmp_path / "f", key_file="key") as staging:
        (staging / "key").write_text("k")
    assert calls == ["fsync", "fsync", "move", "fsync"]


def test_a_folder_appears_in_one_piece_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "f", key_file="key") as staging:
        (staging / "key").write_text("k")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with staged_folder(tmp_path / "sub" / "f", key_file="key") as staging:
        (staging / "key").write_text("k")
        assert not (tmp_path / "sub" / "f").exists()
    assert (tmp_path / "sub" / "f" / "key").read_text() == "k"
    assert len(list((tmp_path / "sub").iterdir())) == 1


def test_files_of_a_staged_folder_are_as_readable_as_any(tmp_path: Path) -> None:
    """safetensors makes its files for the owner alone; a folder to hand on must not depend on who wrote which file."""
    with staged_folder(tmp_path / "f", key_file="key") as staging:
        os.close(os.open(staging / "key", os.O_CREAT, 0o600))
    (tmp_path / "plain").touch()
    assert (tmp_path / "f/key").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_old_and_new_files_are_never_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest, real, moved = tmp_path / "f", os.replace, []

    def write(text: str) -> None:
        with staged_folder(dest, key_file="key") as staging:
            for name in ("a", "key", "z"):
                (staging / name).write_text(text)

    def replace(source: Path, target: Path) -> None:
        assert not (dest / "key").exists()
        moved.append(target.name)
        real(source, target)

    write("old")
    (dest / "another").write_text("stays")
    monkeypatch.setattr(os, "replace", replace)
    write("new")
    assert moved == ["a", "z", "key"]
    found = {path.name: path.read_text() for path in dest.iterdir()}
    assert found == {"a": "new", "key": "new", "z": "new", "another": "stays"}


def test_new_folders_are_made_to_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", synced.append)
    make_folder(tmp_path / "a/b/c")
    make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir() and synced == [tmp_path, tmp_path / "a", tmp_path / "a/b"]


def test_discarded_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = tmp_path / "f"
    (dest / "sub").mkdir(parents=True)
    (dest / "sub/file").touch()

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            discard(dest)
    assert not dest.exists()
    (left,) = tmp_path.iterdir()
    assert is_staged(left)
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())
    discard(dest)
    dest.touch()
    discard(dest)
    assert not list(tmp_path.iterdir())


def test_sweep_takes_only_what_it_knows(tmp_path: Path) -> None:
    keep = [".muxtune.lock", "a", ".a.staged", "a.0123abcd.staged", ".a.0123abcd.staged2", ".git"]
    for name in keep:
        (tmp_path / name).touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").touch()
    (tmp_path / ".link.0123abcd.staged").symlink_to(tmp_path / "outside")
    (tmp_path / ".a.b.0123abcd.staged").mkdir()
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*keep, "outside"])
    assert (tmp_path / "outside/file").exists()
