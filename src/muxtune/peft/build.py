"""From a PEFT spec to the adapter it describes, on the attach points of a backbone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from muxtune.peft.base import BaseOp
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.targets import select
from muxtune.spec.peft import Lora


def build_adapter(
    spec: Lora, ops: Mapping[str, BaseOp], *, seed: int, dtype: torch.dtype, device: torch.device
) -> LoraAdapter:
    """A fresh adapter: its start values depend on `seed` and the attach points' names alone.

    `dtype` is the backbone's; parameters are never below float32. Raises AdapterError where a target matches nothing.
    """
    return LoraAdapter(
        select(spec.target_modules, ops).values(),
        r=spec.r,
        scale=spec.scaling,
        dropout=spec.lora_dropout,
        seed=seed,
        dtype=torch.promote_types(dtype, torch.float32),
        device=device,
    )
