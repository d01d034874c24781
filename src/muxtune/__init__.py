"""MuxTune: many PEFT tasks on one frozen backbone, each with exactly the result it would have had alone.

Importing this package imports no torch; the engine is loaded when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxtune.errors import MuxTuneError
from muxtune.spec import Dataset, Job, Lora, RunSpec, StepResult, Validation

if TYPE_CHECKING:
    from muxtune.api import RunResult, train
    from muxtune.engine.local import LocalEngine as Engine

__all__ = [
    "Dataset",
    "Engine",
    "Job",
    "Lora",
    "MuxTuneError",
    "RunResult",
    "RunSpec",
    "StepResult",
    "Validation",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from muxtune.engine.local import LocalEngine

        return LocalEngine
    if name in ("train", "RunResult"):
        from muxtune import api

        return getattr(api, name)
    raise AttributeError(f"module 'muxtune' has no attribute {name!r}")
