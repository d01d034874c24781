"""From a PEFT spec to the adapter it describes, and from an adapter to the files peft reads.

The one place that knows which spec makes which adapter; nothing outside this package asks for a PEFT type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from muxtune.errors import AdapterError
from muxtune.peft.base import BaseOp
from muxtune.peft.convert import PeftPayload, export_lora
from muxtune.peft.folder import read_adapter
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.lora_config import LoraFormat
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


def payload(spec: Lora, adapter: LoraAdapter, *, module_names: Collection[str], fan_in_fan_out: bool) -> PeftPayload:
    """The adapter in peft's format. `module_names`: every module path of the base model."""
    form = LoraFormat(spec.r, spec.lora_alpha, spec.lora_dropout, fan_in_fan_out=fan_in_fan_out)
    return export_lora(adapter.pairs(), form, module_names=module_names)


def start_from(
    spec: Lora, adapter: LoraAdapter, folder: Path, ops: Mapping[str, BaseOp], *, base_sha256: str | None
) -> None:
    """Give `adapter` the values of a PEFT folder, which is untrusted input.

    Raises AdapterError for a folder that is not sound, or that is not the adapter `spec` describes.
    """
    shapes = {name: (op.in_features, op.out_features) for name, op in ops.items()}
    loaded = read_adapter(folder, shapes, base_sha256=base_sha256)
    if loaded.form.r != spec.r or loaded.form.scale != spec.scaling:
        raise AdapterError(
            f"its r is {loaded.form.r}, its scale {loaded.form.scale:g}; the job's are {spec.r} and {spec.scaling:g}",
            where=str(folder),
            hint="set peft.r and peft.lora_alpha to the folder's",
        )
    if loaded.tensors.keys() != adapter.modules.keys():
        differing = sorted(loaded.tensors.keys() ^ adapter.modules.keys())
        raise AdapterError(
            f"it adapts other modules than the job does: {', '.join(differing[:3])}, {len(differing)} in all",
            where=str(folder),
            hint="set peft.target_modules to the folder's",
        )
    adapter.load_pairs(loaded.tensors)
