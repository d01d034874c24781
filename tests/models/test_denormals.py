"""All threads take denormal numbers as zero, or none does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SEEN = """
import sys
import torch
from muxtune.engine.load import load_backbone
from muxtune.models.denormals import flush_denormals
from muxtune.models.sources import resolve

def kept(rows=1 << 18):
    tiny = torch.ones(rows, dtype=torch.int32).view(torch.float32)
    parts = torch.stack([part.any() for part in (tiny * 1.0).view(torch.int32).chunk(8)])
    return set(parts.tolist())

torch.set_num_threads(2)
"""


def _run(code: str, *arguments: str) -> None:
    ended = subprocess.run([sys.executable, "-c", _SEEN + code, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_loading_a_backbone_asks_for_it(tiny_llama: Path) -> None:
    code = "load_backbone(resolve(sys.argv[1]), device='cpu'); assert kept() == {False}"
    _run(code, str(tiny_llama))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_begun_later_do_as_well(threads: int) -> None:
    _run(f"assert flush_denormals(); torch.set_num_threads({threads}); assert kept() == {{False}}")


def test_where_a_worker_ran_before_none_does() -> None:
    """It keeps its own mode, and half of the rows would come out otherwise."""
    _run("assert kept() == {True}; assert not flush_denormals(); assert kept() == {True}")


def test_products_do_too() -> None:
    code = """
assert flush_denormals()
smallest = torch.ones(512, 512, dtype=torch.int32).view(torch.float32)
double = torch.eye(512) * 2
assert not (smallest @ double).view(torch.int32).any()
"""
    _run(code)
