"""A job's name is a safe folder name everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.spec.names import first_repeated, read_name


@pytest.mark.parametrize("name", ["sql", "007", "a.b_c-D", "sql-lr0.001-r8-alpha16", "x" * 128, "console", "com10"])
def test_safe(name: str) -> None:
    assert read_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "a\\b", "/abs", ".hidden", "-flag", "_x", "a b", "a\0", "a\n", "x" * 129, "a."),
        *("con", "CON", "nul.txt", "Com1", "lpt9.log.old", "é", "a\u202eb", "<img>", "~", None, 7, ["a"]),
    ],
)
def test_unsafe(name: object) -> None:
    with pytest.raises(ConfigError):
        read_name(name)


@given(st.text(max_size=40))
def test_what_passes_stays_in_its_folder(name: str) -> None:
    try:
        read_name(name)
    except ConfigError:
        return
    path = Path("/runs") / name
    assert path.parent == Path("/runs") and path.name == name


def test_repeated_but_for_case() -> None:
    assert first_repeated(["a", "b", "A"]) == "A"
    assert first_repeated(["a", "b"]) is None
