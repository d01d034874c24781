"""Norm tuning, PEFT's LN_TUNING (Zhao et al., 2023): y = norm(x; w, b) with w and b of the task's own.

The task trains copies of the norm's weight, and bias where it has one, which start at the backbone's. Copies, and not
a delta: with weight decay it is the weight itself that decays, as in peft. A norm has no output that another could be
made from, so the task's rows are normalised once more with its own values; the normalisation itself is the family's
(Gemma's, say, scales by 1 + w), run in the adapter's precision. Cost: a second pass over the task's own rows.

The folder is peft's: `MODULE.ln_tuning_layers.weight` and `.bias`.

Legend: t rows of one task, D model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import check_keys, clip, targeted
from muxtune.peft.base import Adapter, BackboneView, NormBase, PlainModule
from muxtune.peft.convert import PREFIX, PeftPayload, exported, target_modules
from muxtune.peft.dropout import RowKeys
from muxtune.peft.folder import CONFIG_FILE, read_config, read_tensors
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.stored import Changes, StoredAdapter
from muxtune.peft.targets import norms, select
from muxtune.spec.peft import LnTuning

_PEFT_TYPE = "LN_TUNING"


class NormModule(PlainModule):
    """One norm's own weight, and bias where it has one."""

    def __init__(self, op: NormBase, own: Mapping[str, Tensor]) -> None:
        super().__init__(*own.values())
        self._op = op
        self._own = own
        self._dtype = own["weight"].dtype

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """The rows normalised anew; what the shared norm made of them is not used."""
        return self._op.forward_with(self._own, x_tI.to(self._dtype)).to(y_tO.dtype)


class NormTuningType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: LnTuning, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> Adapter:
        """Copies of the targeted norms; nothing is random. Zeros where the norms have no memory."""
        ops = select(spec.target_modules, norms(view), what="norm")
        if not ops:
            raise AdapterError("the base model has no norm that can be tuned", hint="choose another PEFT type")
        starts = {f"{name}.{key}": start for name, op in ops.items() for key, start in op.parameters.items()}
        shapes = {name: tuple(start.shape) for name, start in starts.items()}
        parameters = FlatParameters(shapes, dtype, device)
        parameters.load(
            {name: start if not start.is_meta else torch.zeros(start.shape) for name, start in starts.items()}
        )
        views = parameters.views
        modules = {
            name: NormModule(op, {key: views[f"{name}.{key}"] for key in op.parameters}) for name, op in ops.items()
        }
        return Adapter(modules, parameters)

    def payload(self, spec: LnTuning, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's LN_TUNING."""
        own = norms(view)
        tensors = {
            _key(name, key): exported(adapter.parameters.views[f"{name}.{key}"], where=name, what=f"the norm's {key}")
            for name in sorted(adapter.modules)
            for key in own[name].parameters
        }
        config: dict[str, JsonValue] = {
            "peft_type": _PEFT_TYPE,
            "task_type": "CAUSAL_LM",
            "target_modules": target_modules(adapter.modules, view.module_names),
            "exclude_modules": None,
            "modules_to_save": None,
            "inference_mode": True,
            "revision": None,
        }
        return PeftPayload(config, tensors)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's LN_TUNING, of norms that are attach points here."""
        config, where, own = read_config(folder), str(folder / CONFIG_FILE), norms(view)
        check_keys(config, peft_type=_PEFT_TYPE, neutral={}, harmless=(), where=where)
        names = targeted(config, own, where=where)
        if not names:
            raise AdapterError(
                f"target_modules {clip(config.get('target_modules'))} name no norm of this model",
                where=where,
                hint=f"this one has {', '.join(sorted(own)[:3])}, ...",
            )
        layout = {_key(name, key): tuple(own[name].parameters[key].shape) for name in names for key in _keys(own[name])}
        found = read_tensors(folder, config, layout, why_extra=_why_extra, base_sha256=base_sha256)
        values = {f"{name}.{key}": found.tensors[_key(name, key)] for name in names for key in _keys(own[name])}
        spec = LnTuning(target_modules=tuple(sorted(names)))
        return StoredAdapter(spec, values, found.base_name, found.manifest)

    def changes(self, stored: StoredAdapter, view: BackboneView) -> Changes:
        """The task's values instead of the base model's."""
        return {name: partial(_instead, value) for name, value in stored.values.items()}


def _instead(value: Tensor, old: Tensor) -> Tensor:
    return value.to(old)


def _keys(op: NormBase) -> tuple[str, ...]:
    return tuple(op.parameters)


def _key(name: str, parameter: str) -> str:
    return f"{PREFIX}{name}.ln_tuning_layers.{parameter}"


def _why_extra(key: str) -> str:
    return "only base_model.model.MODULE.ln_tuning_layers.weight (or bias) of the targeted norms are read"


LN_TUNING = NormTuningType()
