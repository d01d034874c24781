"""The token cache: exact, private, whole or absent, and never in the way."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxtune.data import cache as cache_module
from muxtune.data.cache import TokenCache, cache_key
from muxtune.data.tokens import TableBuilder, TokenizedFile


def tokens(seed: int = 0, examples: int = 5, system: str | None = "Be brief.") -> TokenizedFile:
    rng = np.random.default_rng(seed)
    builder = TableBuilder()
    for line in range(1, examples + 1):
        ids = rng.integers(0, 50_000, size=rng.integers(0, 20)).astype(np.int32)
        mask = rng.random(len(ids)) < 0.5
        mask[:1] = False
        builder.add(ids, mask, line)
    return TokenizedFile(builder.build(), "messages", "ab" * 32, system)


def same(a: TokenizedFile | None, b: TokenizedFile) -> bool:
    return a is not None and a.table.equals(b.table) and (a.shape, a.sha256, a.system) == (b.shape, b.sha256, b.system)


KEY = "k" * 64


@pytest.mark.parametrize("examples", [0, 1, 5])
def test_a_cached_set_equals_a_fresh_one(tmp_path: Path, examples: int) -> None:
    cache = TokenCache(tmp_path / "tokens")
    assert cache.load(KEY) is None
    for system in (None, "", "Sé breve \U0001f600"):
        fresh = tokens(examples=examples, system=system)
        cache.store(KEY, fresh)
        assert same(cache.load(KEY), fresh)


def test_entries_are_private_to_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    TokenCache(folder).store(KEY, tokens())
    (entry,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, entry.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TokenCache(tmp_path)
    cache.store(KEY, tokens())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.load(KEY) is None
    cache.store("other" + KEY, tokens())
    assert len(list(tmp_path.iterdir())) == 1
    assert "belongs to another user" in caplog.text


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_entry_is_found_out_and_deleted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cache = TokenCache(tmp_path_factory.mktemp("cache"))
    cache.store(KEY, tokens())
    (entry,) = cache.folder.iterdir()
    whole = entry.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut_short = data.draw(st.booleans())
    entry.write_bytes(whole[:at] if cut_short else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert cache.load(KEY) is None
    assert not entry.exists()
    cache.store(KEY, tokens())
    assert same(cache.load(KEY), tokens())


def test_warnings_hold_no_example_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cache = TokenCache(tmp_path)
    cache.store(KEY, tokens(system="my-secret"))
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes() + b"my-secret")
    assert cache.load(KEY) is None
    assert "is damaged" in caplog.text and "my-secret" not in caplog.text


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = TokenCache(tmp_path / "file" / "tokens")
    cache.store(KEY, tokens())
    assert cache.load(KEY) is None
    assert "cannot be written" in caplog.text


def test_an_entry_that_cannot_be_marked_as_used_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is mounted read-only."""
    cache = TokenCache(tmp_path)
    assert cache.store(KEY, tokens()) and not TokenCache(tmp_path, limit_bytes=1).store(KEY, tokens())

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    assert same(cache.load(KEY), tokens()) and caplog.text == ""


def test_the_least_recently_used_go_first_and_the_newest_stays(tmp_path: Path) -> None:
    size = len(cache_module._encode(tokens()))
    cache = TokenCache(tmp_path, limit_bytes=3 * size + size // 2)
    for age_s, key in ((400, "a"), (300, "b"), (200, "c")):
        cache.store(key, tokens())
        then = os.stat(tmp_path / f"{key}.tokens").st_mtime - age_s
        os.utime(tmp_path / f"{key}.tokens", (then, then))
    assert cache.load("a") is not None  # used: now the newest
    cache.store("d", tokens())
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]
    cache.store("huge", tokens(examples=500))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_what_a_killed_writer_left_is_cleaned_up(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    old, fresh = tmp_path / "old.part", tmp_path / "fresh.part"
    old.write_text("")
    fresh.write_text("")
    os.utime(old, (1, 1))
    cache.store(KEY, tokens())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".part", ".tokens"]
    assert fresh.exists()


WRITER = """
import sys; from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.data.test_cache import KEY, TokenCache, same, tokens
cache = TokenCache(Path(sys.argv[1]))
for _ in range(40):
    cache.store(KEY, tokens())
    assert same(cache.load(KEY), tokens())
"""


def test_two_processes_may_make_the_same_entry(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", WRITER, str(tmp_path), root]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors.decode()
    assert same(TokenCache(tmp_path).load(KEY), tokens())
    assert [path.suffix for path in tmp_path.iterdir()] == [".tokens"]


def test_everything_that_decides_the_content_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        cache_key(file_sha256="a", declared=None, renderer="r"),
        cache_key(file_sha256="b", declared=None, renderer="r"),
        cache_key(file_sha256="a", declared="text", renderer="r"),
        cache_key(file_sha256="a", declared=None, renderer="s"),
    ]
    again = cache_key(file_sha256="a", declared=None, renderer="r")
    assert keys[0] == again
    monkeypatch.setattr(cache_module, "_code_fingerprint", lambda: "another version of the code")
    keys.append(cache_key(file_sha256="a", declared=None, renderer="r"))
    assert len(set(keys)) == 5
