"""MuxTune: many PEFT tasks on one frozen backbone, each with exactly the result it would have had alone.

Importing this package imports neither torch nor pydantic: a name is loaded when it is first used, so that
`muxtune --help` answers at once. Import it before torch is used: `environment` says what it prepares.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from muxtune.environment import cpu_vendor, prepare
from muxtune.errors import MuxTuneError

if TYPE_CHECKING:
    from muxtune.api import RunResult, train
    from muxtune.data.types import Message
    from muxtune.engine.local import LocalEngine as Engine
    from muxtune.spec import (
        IA3,
        BitFit,
        Bottleneck,
        Dataset,
        Job,
        LnTuning,
        Lora,
        PrefixTuning,
        PromptTuning,
        RunSpec,
        Shira,
        StepResult,
        Validation,
    )

__all__ = [
    "IA3",
    "BitFit",
    "Bottleneck",
    "Dataset",
    "Engine",
    "Job",
    "LnTuning",
    "Lora",
    "Message",
    "MuxTuneError",
    "PrefixTuning",
    "PromptTuning",
    "RunResult",
    "RunSpec",
    "Shira",
    "StepResult",
    "Validation",
    "train",
]

prepare(os.environ, cpu_vendor())

_HOMES = {name: ("muxtune.spec", name) for name in __all__ if name != "MuxTuneError"} | {
    "Engine": ("muxtune.engine.local", "LocalEngine"),
    "train": ("muxtune.api", "train"),
    "RunResult": ("muxtune.api", "RunResult"),
    "Message": ("muxtune.data.types", "Message"),
}
_KINDS = {  # what `type` takes in a config file, and has no class of its own
    "dora": "Lora(use_dora=True)",
    "rslora": "Lora(use_rslora=True)",
    "pissa": 'Lora(init_lora_weights="pissa")',
    "houlsby": 'Bottleneck(placement="houlsby")',
    "pfeiffer": 'Bottleneck(placement="pfeiffer")',
    "parallel": 'Bottleneck(placement="parallel")',
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'muxtune' has no attribute {name!r}{_hint(name)}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def _hint(name: str) -> str:
    """What may have been meant: a kind of a PEFT type, or a name that is spelt otherwise."""
    plain = name.replace("_", "").lower().removesuffix("config")
    if plain in _KINDS:
        return f": say muxtune.{_KINDS[plain]}"
    if name.startswith("_"):  # Python itself asks for such names
        return ""
    from difflib import get_close_matches

    spelt = {public.lower(): public for public in __all__}
    near = get_close_matches(plain, spelt, n=1, cutoff=0.75)
    return f": did you mean muxtune.{spelt[near[0]]}?" if near else f"; it has {', '.join(__all__)}"


def __dir__() -> list[str]:
    return sorted(__all__)
