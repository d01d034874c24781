"""What a measurement was made on: a figure without its machine means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """`load_1min` is the load average when the measurement began: well above the process's own threads, somebody else
    was at work and the figures are poor. `commit` ends in `+` where files differed from it."""

    cpu: str
    cores: int
    memory_bytes: int
    device: str
    threads: int
    torch: str
    transformers: str
    peft: str
    python: str
    commit: str
    load_1min: float


def describe(device: torch.device) -> Machine:
    """The machine now, as this process uses it."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=version("transformers"),
        peft=version("peft"),
        python=platform.python_version(),
        commit=_commit(),
        load_1min=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Of this checkout; empty outside one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    return commit + "+" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
