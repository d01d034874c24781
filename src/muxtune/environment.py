"""What has to be in a process's environment before torch is used, set when this package is imported.

Both are read once by a library below torch and cannot be asked for later; what the user has set stays as it is. Imports
nothing of this package, and not torch.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

_SPINS = "20000"  # docs/log.md has what this was measured at
_CPU_INFO = Path("/proc/cpuinfo")
_FIRST_BYTES = 512


def prepare(environment: MutableMapping[str, str], cpu: str) -> None:
    """`cpu`: the vendor's name, of `cpu_vendor`.

    Threads that wait for others spin for a moment and then sleep: spinning on, as they do by default, makes a run many
    times slower once another process takes a core. Read when torch is imported.

    MKL's strict mode gives a row of a product the same bits whatever rows stand beside it, wherever it begins and on
    any number of threads (ADR 12), at the speed of its usual mode. Read at the first product. It is made for Intel's
    own CPUs; elsewhere MKL would leave its fast kernels.
    """
    if not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environment["GOMP_SPINCOUNT"] = _SPINS
    if cpu == "GenuineIntel":
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")


def cpu_vendor(info: Path = _CPU_INFO) -> str:
    """As Linux names it; empty elsewhere."""
    try:
        with info.open() as lines:
            start = lines.read(_FIRST_BYTES)
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in start.splitlines() if line.startswith("vendor_id")), "")
