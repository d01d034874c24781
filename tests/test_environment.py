"""What importing muxtune puts in a process's environment, and that it does what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muxtune.environment import cpu_vendor, prepare

OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_CBWR")


@pytest.mark.parametrize(
    ("said", "cpu", "added"),
    [
        ({}, "GenuineIntel", {"GOMP_SPINCOUNT": "20000", "MKL_CBWR": "AUTO,STRICT"}),
        ({}, "AuthenticAMD", {"GOMP_SPINCOUNT": "20000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "", {}),
        ({"GOMP_SPINCOUNT": "7", "MKL_CBWR": "AVX2"}, "GenuineIntel", {}),
    ],
    ids=str,
)
def test_only_what_the_user_has_not_said_is_added(said: dict[str, str], cpu: str, added: dict[str, str]) -> None:
    environment = dict(said)
    prepare(environment, cpu)
    assert environment == said | added


def test_the_vendor_is_read_off_linux_and_empty_elsewhere(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert cpu_vendor(info) == ""
    info.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n")
    assert cpu_vendor(info) == "GenuineIntel"
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cpu_vendor(info) == ""


def test_it_is_there_before_torch() -> None:
    code = "import sys, os, muxtune; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    ended = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert ended.stdout == "20000\n"


@pytest.mark.skipif(cpu_vendor() != "GenuineIntel", reason="MKL's strict mode is asked for on Intel's CPUs")
def test_rows_of_products_of_every_size_are_the_same_bits() -> None:
    """Of the embedded model's widths and a larger model's, each of which MKL's usual mode changes on some CPU."""
    code = """
import muxtune, torch
torch.set_num_threads(2)
torch.manual_seed(0)
for out, inner in [(576, 1536), (1536, 576), (576, 960), (2048, 2048)]:
    for dtype in (torch.float32, torch.float64):
        weight, rows = torch.randn(out, inner, dtype=dtype), torch.randn(2048, inner, dtype=dtype)
        alone = rows[:16] @ weight.T
        for total in (16, 48, 112, 256, 512, 2048):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal((rows[:total] @ weight.T)[:16], alone), (out, inner, dtype, total, threads)
"""
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    subprocess.run([sys.executable, "-c", code], env=kept, check=True, capture_output=True)
