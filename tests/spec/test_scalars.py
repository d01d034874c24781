"""One reading of numbers, flags and choices for text, Python and JSON."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec.scalars import choice, clip, parse_number, read_flag, read_integer, read_number, read_path, read_size


@pytest.mark.parametrize(
    ("text", "number"),
    [("2e-3", 0.002), ("1E3", 1000), (".5", 0.5), ("3.", 3), ("-0", 0), ("+4", 4), ("007", 7), ("1.0", 1), ("010", 10)],
)
def test_numbers(text: str, number: float) -> None:
    assert parse_number(text) == number
    assert read_number(text) == number
    assert type(read_number(text)) is type(number)


@pytest.mark.parametrize("text", ["", "x", "0x10", "1_000", "1:30", "nan", "inf", "1e", "e3", "٣", "1 2", "9" * 65])
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None
    with pytest.raises(ConfigError, match="should be a number"):
        read_number(text)


@pytest.mark.parametrize("value", [True, None, [1], float("nan"), float("inf"), "1e999", "-1e999"])
def test_values_that_are_no_finite_number(value: object) -> None:
    with pytest.raises(ConfigError):
        read_number(value)


def test_integers_are_whole() -> None:
    assert [read_integer(value) for value in (3, 3.0, "3", "3.0", "3e2")] == [3, 3, 3, 3, 300]
    for value in (3.5, "3.5", True, "2e-1"):
        with pytest.raises(ConfigError):
            read_integer(value)


def test_flags() -> None:
    assert [read_flag(value) for value in (True, "true", "Yes", "ON")] == [True] * 4
    assert [read_flag(value) for value in (False, "false", "No", "off")] == [False] * 4
    for value in (1, "1", "", None, "y"):
        with pytest.raises(ConfigError):
            read_flag(value)


def test_paths_are_text_that_a_system_can_open() -> None:
    assert read_path("007") == "007"
    for value in ("", "  ", "a\0b", None, 3):
        with pytest.raises(ConfigError):
            read_path(value)


def test_choices_know_aliases_and_what_is_to_come() -> None:
    read = choice("adamw", aliases={"adamw_torch": "adamw"}, later=("lion",))
    assert [read("adamw"), read("AdamW"), read("adamw_torch")] == ["adamw"] * 3
    for value, message in [("lion", "not supported yet"), ("adamv", "did you mean 'adamw'"), (3, "one of adamw")]:
        with pytest.raises(ConfigError, match=message):
            read(value)


def test_shown_values_are_short() -> None:
    assert (clip("3"), clip("x"), clip(3)) == ("3", "'x'", "3")
    assert len(clip("y" * 1000)) == 60


@pytest.mark.parametrize("value", ["1e30", 1e30, 10**40, "9" * 30, -(2**70), 2**63])
def test_what_is_whole_and_too_large_is_called_so(value: object) -> None:
    with pytest.raises(ConfigError, match="too large for a whole number") as caught:
        read_integer(value)
    assert caught.value.hint == "at most 9223372036854775807"


def test_whole_numbers_that_an_exponent_blurs_want_their_digits() -> None:
    assert read_integer(str(10**17)) == 10**17
    with pytest.raises(ConfigError, match="too large") as caught:
        read_integer("1e17")
    assert caught.value.hint == "its digits in full"


def test_sizes() -> None:
    assert [read_size(value) for value in (5, "5", "1.5GB", "2 GiB", "3k")] == [5, 5, 1_500_000_000, 2 << 30, 3000]
    for value in ("5XB", "GB", "", "5 GB x"):
        with pytest.raises(ConfigError, match="should be a size") as caught:
            read_size(value)
        assert "GiB" in (caught.value.hint or "")
    for value in (None, [5], 1.5, "9" * 40 + "TB"):
        with pytest.raises(ConfigError):
            read_size(value)
