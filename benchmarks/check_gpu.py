"""`make check-gpu`: whether a CUDA machine computes what the CPU does, and how fast.

    python -m benchmarks.check_gpu [--device cuda] [--tiny] [--no-bench]

Two models - a tiny random Llama and the first two layers of SmolLM2-135M - in fp32 and bf16, eight tasks of unlike
lengths. The checks are in `numerics` and, for several devices, `gpu_ranks`; each prints its figure beside what is
allowed. Then the tables of `bench` follow, on the device, in fp32 and bf16. `--device cpu --tiny` tests this script
itself where there is no GPU (bf16 products are slow on a CPU).

Exits 0 where all checks pass, 1 where one fails, 3 where there is no such device and so nothing was checked.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from itertools import chain

import torch
from rich.console import Console

from benchmarks import bench, folders, gpu_ranks, memory
from benchmarks.folders import tiny_folder
from benchmarks.machine import describe
from benchmarks.numerics import Check, Subject, checks
from benchmarks.report import show_machine

NO_DEVICE = 3
LAYERS = 2


def check_all(console: Console, device: torch.device, *, tiny: bool = False) -> bool:
    """Run and print every check, of the tiny model only where `tiny` says so; true where all pass."""
    passed = True
    folders = {name: open_ for name, open_ in _FOLDERS.items() if not tiny or open_ is tiny_folder}
    for name, dtype in ((name, dtype) for dtype in (torch.float32, torch.bfloat16) for name in folders):
        with folders[name]() as folder:
            console.print(f"{name}, {str(dtype).removeprefix('torch.')}", highlight=False)
            subject = Subject(folder, device, dtype)
            for check in chain(checks(subject), gpu_ranks.rank_checks(subject), [gpu_ranks.varlen(subject)]):
                passed = _show(console, check) and passed
    return _show(console, gpu_ranks.nccl_order(device)) and passed


def _show(console: Console, check: Check) -> bool:
    """Whether it has not failed."""
    word = {True: "ok  ", False: "FAIL", None: "left out"}[check.passed]
    console.print(f"  {word} {check.name}: {check.detail}", highlight=False, soft_wrap=True)
    return check.passed is not False


_FOLDERS = {
    "tiny random Llama": tiny_folder,
    f"{folders.MODEL}, {LAYERS} layers": lambda: folders.model_folder(folders.MODEL, LAYERS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check_gpu", description="See benchmarks/check_gpu.py.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to test this script itself")
    parser.add_argument("--tiny", action="store_true", help="the tiny model only")
    parser.add_argument("--no-bench", action="store_true", help="numerics only")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", memory.PEFT_NOISE, FutureWarning)
    console = Console()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        console.print("no CUDA device: nothing checked")
        return NO_DEVICE
    device = torch.device(options.device)
    show_machine(console, describe(device))
    passed = check_all(console, device, tiny=options.tiny)
    console.print("all checks pass" if passed else "some checks FAILED")
    agreed = True
    for dtype in () if options.no_bench else ("fp32", "bf16"):
        parts = ["--part", "light", "--part", "non-uniform", "--device", options.device, "--dtype", dtype]
        agreed = bench.main(parts) == 0 and agreed
    return 0 if passed and agreed else 1


if __name__ == "__main__":
    sys.exit(main())
