"""Files are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muxtune.durable import staged_folder, write_durably


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
