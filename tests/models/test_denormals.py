"""In a pass all threads take denormal numbers as zero, or none does; elsewhere nothing has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SEEN = """
import sys
import torch
from muxtune.engine.load import load_backbone
from muxtune.models.denormals import flushing, threads_flush
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


def test_a_backbone_that_was_loaded_runs_its_passes_so_and_nothing_else(tiny_llama: Path) -> None:
    code = """
from muxtune.engine.engine import Engine
from tests.engine.build import Trial, attach
backbone = load_backbone(resolve(sys.argv[1]), device='cpu')
assert backbone.flushes and kept(64) == {True}
engine = Engine(backbone)
task = attach(engine, Trial("one", [7, 9]))
seen = []
inner = backbone.hidden
backbone.hidden = lambda *a, **k: (seen.append(kept()), inner(*a, **k))[1]
engine.execute(engine.schedule([task.participant()]))
assert seen == [{False}] and kept(64) == {True}
"""
    _run(code, str(tiny_llama))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_begun_later_in_a_pass_do_as_well(threads: int) -> None:
    code = f"""
assert threads_flush()
torch.set_num_threads({threads})
with flushing(True):
    assert kept() == {{False}}
"""
    _run(code)


def test_where_a_worker_ran_before_none_does() -> None:
    """It keeps its own mode, and half of the rows would come out otherwise."""
    _run("assert kept() == {True}; assert not threads_flush(); assert kept() == {True}")


def test_who_is_in_the_mode_already_stays_in_it() -> None:
    code = """
torch.set_flush_denormal(True)
assert threads_flush() and kept() == {False}
with flushing(True):
    assert kept() == {False}
with flushing(False):
    assert kept() == {False}
assert kept() == {False}
"""
    _run(code)


def test_products_do_too() -> None:
    code = """
assert threads_flush()
with flushing(True):
    smallest = torch.ones(512, 512, dtype=torch.int32).view(torch.float32)
    assert not (smallest @ (torch.eye(512) * 2)).view(torch.int32).any()
"""
    _run(code)
