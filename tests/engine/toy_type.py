"""A PEFT type that MuxTune does not have, added as docs/methods.md says: scale and shift (SSF, Lian et al. 2022).

    y = g * (W x + b) + d        g [O] starts at one, d [O] at zero

The three parts of a type - spec, module, `PeftType` - in one file; `register` enters them in the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from muxtune.peft import registry
from muxtune.peft.adapter_config import check_keys, targeted
from muxtune.peft.base import Adapter, BackboneView, PlainModule
from muxtune.peft.convert import PREFIX, PeftPayload, exported, target_modules
from muxtune.peft.dropout import RowKeys
from muxtune.peft.folder import CONFIG_FILE, read_config, read_tensors
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.stored import StoredAdapter
from muxtune.peft.targets import linears, select
from muxtune.spec.peft import PeftBase, Place, union
from muxtune.spec.peft.targets import Targets
from muxtune.spec.peft.targets import targeted as places_targeted
from muxtune.spec.peft.targets import unmatched as places_unmatched

OWN = "MUXTUNE_SCALE_SHIFT"


class ScaleShift(PeftBase):
    default_learning_rate = 1e-2

    type: Literal["scale_shift"] = "scale_shift"
    target_modules: Targets = "all-linear"

    def unmatched(self, places: Iterable[Place]) -> tuple[str, ...]:
        return places_unmatched(self.target_modules, places)

    def parameters(self, places: Iterable[Place]) -> int:
        return sum(2 * place.outputs for place in places_targeted(self.target_modules, places))

    def flops_per_token(self, places: Iterable[Place]) -> int:
        return 3 * self.parameters(places)  # forward, the gradient of the input, that of the vectors


class ScaleShiftModule(PlainModule):
    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        scale_O, shift_O = self.parameters
        return (y_tO * scale_O + shift_O).to(y_tO.dtype)


class ScaleShiftType:
    def build(
        self, spec: ScaleShift, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> Adapter:
        ops = select(spec.target_modules, linears(view))
        shapes = {f"{name}.{part}": (op.out_features,) for name, op in ops.items() for part in ("scale", "shift")}
        parameters = FlatParameters(shapes, dtype, device)
        views = parameters.views
        for name in ops:
            views[f"{name}.scale"].detach().fill_(1)
        modules = {name: ScaleShiftModule(views[f"{name}.scale"], views[f"{name}.shift"]) for name in ops}
        return Adapter(modules, parameters)

    def payload(self, spec: ScaleShift, adapter: Adapter, view: BackboneView) -> PeftPayload:
        config = {"peft_type": OWN, "target_modules": target_modules(adapter.modules, view.module_names)}
        views = adapter.parameters.views
        return PeftPayload(config, {f"{PREFIX}{name}": exported(views[name], where=name, what="it") for name in views})

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        config, where = read_config(folder), str(folder / CONFIG_FILE)
        check_keys(config, peft_type=OWN, neutral={}, harmless=(), where=where)
        ops = linears(view)
        names = targeted(config, ops, where=where)
        layout = {f"{PREFIX}{name}.{part}": (ops[name].out_features,) for name in names for part in ("scale", "shift")}
        found = read_tensors(folder, config, layout, why_extra=lambda _: "no such module", base_sha256=base_sha256)
        values = {key.removeprefix(PREFIX): tensor for key, tensor in found.tensors.items()}
        return StoredAdapter(ScaleShift(target_modules=tuple(sorted(names))), values, found.base_name, found.manifest)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter the type in the three tables, for one test."""
    made = ScaleShiftType()
    monkeypatch.setitem(union.PEFT_SPECS, "scale_shift", ScaleShift)
    monkeypatch.setitem(registry.TYPES, ScaleShift, made)
    monkeypatch.setitem(registry.READERS, OWN, made)
