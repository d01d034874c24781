"""Help answers at once: it loads nothing that is heavy, and every command has some."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in ("train", "sample", "export", "doctor", "version", "data", "config", "models")),
    *(["data", name, "--help"] for name in ("check", "preview")),
    ["config", "print", "--help"],
    *(["models", name, "--help"] for name in ("list", "pull", "export")),
)
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "rich", "yaml", "psutil", "huggingface_hub")
MUXTUNE = Path(sys.executable).with_name("muxtune")

_ALL = f"""
import sys
from muxtune.cli.main import run
for command in {COMMANDS!r}:
    assert run(command) == 0, command
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (command, loaded)
"""


def test_help_of_every_command_loads_nothing_heavy() -> None:
    ended = subprocess.run([sys.executable, "-c", _ALL], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Usage: muxtune") == len(COMMANDS) - 1
    assert "\x1b" not in ended.stdout


def test_help_is_fast() -> None:
    """Processor time, which other work on the machine does not stretch: the least of three."""
    times_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [MUXTUNE, "train", "--help"], capture_output=True, check=True, env={**os.environ, "FORCE_COLOR": "1"}
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times_s) < 0.5


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = (*HEAVY, "pydantic")
    code = (
        f"import sys, muxtune; assert not [one for one in {heavy!r} if one in sys.modules]; muxtune.Job, muxtune.Lora"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
