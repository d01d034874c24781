"""Contenders for the memory measurement whose outcome is known; without torch, so that children start at once."""

from __future__ import annotations

from pathlib import Path

HELD_BYTES = 40_000_000


def hold(folder: Path, tasks: int) -> object:
    """Keeps HELD_BYTES a task."""
    return bytearray(b"x" * (HELD_BYTES * tasks))


def fail(folder: Path, tasks: int) -> object:
    """Fails in its step."""
    raise ValueError("no step")
