"""LoRA and its kin as one PEFT type: their spec to an adapter, and both ways between it and peft's folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muxtune.peft import dora
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PeftPayload
from muxtune.peft.dora import DoraAdapter
from muxtune.peft.lora import EMBEDDING_A, EMBEDDING_B, LoraAdapter, LowRankAdapter
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.lora_convert import LoadedLora, export_lora, read_lora
from muxtune.peft.pissa import PissaAdapter
from muxtune.peft.stored import Changes, StoredAdapter
from muxtune.peft.targets import linears, select, select_any
from muxtune.spec.peft import Lora


class LoraType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: Lora, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> LowRankAdapter:
        """Pairs at the linears that the spec targets, and of a LoRA at the embedding and the head if it names them."""
        r, scale, dropout = spec.r, spec.scaling, spec.lora_dropout
        if not spec.use_dora and not spec.pissa:
            ops = select_any(spec.target_modules, view)
            return LoraAdapter(ops, r=r, scale=scale, dropout=dropout, seed=seed, dtype=dtype, device=device)
        own = select(spec.target_modules, linears(view)).values()
        if spec.pissa:
            return PissaAdapter(own, r=r, scale=scale, dropout=dropout, dtype=dtype, device=device)
        return DoraAdapter(own, r=r, scale=scale, dropout=dropout, seed=seed, dtype=dtype, device=device)

    def payload(self, spec: Lora, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's LORA; a PiSSA as the plain LoRA of twice the rank, which needs no dropout and no changed base."""
        assert isinstance(adapter, LowRankAdapter)
        transposed = any(op.transposed for name, op in linears(view).items() if name in adapter.modules)
        names = view.module_names
        if isinstance(adapter, PissaAdapter):
            plain = LoraFormat(2 * spec.r, 2 * spec.r * spec.scaling, fan_in_fan_out=transposed)
            return export_lora(adapter.plain_pairs(), plain, module_names=names)
        form = LoraFormat(
            spec.r,
            spec.lora_alpha,
            spec.lora_dropout,
            use_rslora=spec.use_rslora,
            use_dora=spec.use_dora,
            fan_in_fan_out=transposed,
        )
        magnitudes = adapter.magnitudes() if isinstance(adapter, DoraAdapter) else None
        pairs, embedding = adapter.pairs(), adapter.embedding_pairs()
        return export_lora(pairs, form, module_names=names, magnitudes=magnitudes, embedding=embedding)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's LORA, but for those whose base was changed."""
        shapes = {name: (op.in_features, op.out_features) for name, op in linears(view).items()}
        loaded = read_lora(folder, shapes, ends=view.ends, base_sha256=base_sha256)
        values = {f"{name}.lora_A": a for name, (a, _) in loaded.tensors.items()}
        values |= {f"{name}.lora_B": b for name, (_, b) in loaded.tensors.items()}
        values |= {f"{name}.lora_magnitude_vector": m for name, m in loaded.magnitudes.items()}
        values |= {f"{name}.{EMBEDDING_A}": a for name, (a, _) in loaded.embedding.items()}
        values |= {f"{name}.{EMBEDDING_B}": b for name, (_, b) in loaded.embedding.items()}
        return StoredAdapter(_spec(loaded), values, loaded.base_name, loaded.manifest)

    def changes(self, stored: StoredAdapter, view: BackboneView) -> Changes:
        """W + s B A; of a DoRA its rows scaled to their lengths; of the embedding, whose rows are entries, W + s A^T
        B^T (its own scale comes after the lookup, for both)."""
        spec, values = stored.spec, stored.values
        assert isinstance(spec, Lora) and not spec.pissa
        changes: dict[str, Callable[[Tensor], Tensor]] = {}
        for name in spec.target_modules:
            if f"{name}.{EMBEDDING_A}" in values:
                a_RV, b_ER = values[f"{name}.{EMBEDDING_A}"], values[f"{name}.{EMBEDDING_B}"]
                changes[f"{name}.weight"] = partial(_moved, b_ER.T, a_RV.T, spec.scaling, None)
                continue
            a_RI, b_OR = values[f"{name}.lora_A"], values[f"{name}.lora_B"]
            magnitude_O = values[f"{name}.lora_magnitude_vector"] if spec.use_dora else None
            changes[f"{name}.weight"] = partial(_moved, a_RI, b_OR, spec.scaling, magnitude_O)
        return changes


def _moved(a_RI: Tensor, b_OR: Tensor, scale: float, magnitude_O: Tensor | None, weight_OI: Tensor) -> Tensor:
    if magnitude_O is not None:
        return dora.merged(weight_OI, a_RI, b_OR, magnitude_O, scale)
    return torch.addmm(weight_OI, b_OR.to(weight_OI), a_RI.to(weight_OI), alpha=scale)


def _spec(loaded: LoadedLora) -> Lora:
    """What a folder's config says, but for its dropout: it answers, or goes on with the dropout of a job."""
    form = loaded.form
    return Lora(
        r=form.r,
        lora_alpha=form.lora_alpha,
        lora_dropout=0,
        use_rslora=form.use_rslora,
        use_dora=form.use_dora,
        target_modules=tuple(sorted((*loaded.tensors, *loaded.embedding))),
    )


LORA = LoraType()
