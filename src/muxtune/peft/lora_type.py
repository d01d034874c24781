"""LoRA as a PEFT type: its spec to an adapter, and both ways between the adapter and peft's folders."""

from __future__ import annotations

from pathlib import Path

import torch

from muxtune.errors import AdapterError
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PeftPayload, export_lora
from muxtune.peft.folder import read_adapter
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.targets import linears, select
from muxtune.spec.peft import Lora


class LoraType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: Lora, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> LoraAdapter:
        """Pairs at the linears that the spec targets."""
        return LoraAdapter(
            select(spec.target_modules, linears(view)).values(),
            r=spec.r,
            scale=spec.scaling,
            dropout=spec.lora_dropout,
            seed=seed,
            dtype=dtype,
            device=device,
        )

    def payload(self, spec: Lora, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's LORA."""
        assert isinstance(adapter, LoraAdapter)
        fan_in_fan_out = any(linears(view)[name].transposed for name in adapter.modules)
        form = LoraFormat(spec.r, spec.lora_alpha, spec.lora_dropout, fan_in_fan_out=fan_in_fan_out)
        return export_lora(adapter.pairs(), form, module_names=view.module_names)

    def load(self, spec: Lora, adapter: Adapter, folder: Path, view: BackboneView, *, base_sha256: str | None) -> None:
        """From peft's LORA, where rank, scale and targets are the spec's."""
        assert isinstance(adapter, LoraAdapter)
        shapes = {name: (op.in_features, op.out_features) for name, op in linears(view).items()}
        loaded = read_adapter(folder, shapes, base_sha256=base_sha256)
        if loaded.form.r != spec.r or loaded.form.scale != spec.scaling:
            raise AdapterError(
                f"its r is {loaded.form.r}, its scale {loaded.form.scale:g}; "
                f"the job's are {spec.r} and {spec.scaling:g}",
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


LORA = LoraType()
