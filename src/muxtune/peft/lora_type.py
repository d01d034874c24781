"""LoRA and its kin as one PEFT type: their spec to an adapter, and both ways between it and peft's folders."""

from __future__ import annotations

from pathlib import Path

import torch

from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PeftPayload
from muxtune.peft.lora import LoraAdapter
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.lora_convert import export_lora, read_lora
from muxtune.peft.stored import StoredAdapter
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

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's LORA; an rsLoRA is read as the LoRA of the same scale."""
        shapes = {name: (op.in_features, op.out_features) for name, op in linears(view).items()}
        loaded = read_lora(folder, shapes, base_sha256=base_sha256)
        form = loaded.form
        spec = Lora(
            r=form.r,
            lora_alpha=form.scale * form.r,
            lora_dropout=0,
            target_modules=tuple(sorted(loaded.tensors)),
        )
        values = {f"{name}.lora_A": a for name, (a, _) in loaded.tensors.items()}
        values |= {f"{name}.lora_B": b for name, (_, b) in loaded.tensors.items()}
        return StoredAdapter(spec, values, loaded.base_name, loaded.manifest)


LORA = LoraType()
