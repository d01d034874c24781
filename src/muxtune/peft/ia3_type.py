"""IA3 as a PEFT type: its spec to an adapter, and both ways between the adapter and peft's folders.

peft keeps a vector as [O, 1] where it scales an output and as [1, I] where it scales an input, and finds the latter by
plain endings of module names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import Neutral, check_keys, clip, read_flag, read_names, targeted
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PREFIX, PeftPayload, exported, target_modules
from muxtune.peft.folder import CONFIG_FILE, read_config, read_tensors
from muxtune.peft.ia3 import IA3Adapter
from muxtune.peft.stored import Changes, StoredAdapter
from muxtune.peft.targets import linears
from muxtune.spec.peft import IA3, Place

_TENSOR_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.ia3_l")
_NEUTRAL: Neutral = {"init_ia3_weights": ((None, True, False), "it must be true or false")}
_HARMLESS = frozenset({"feedforward_modules", "fan_in_fan_out"})


class IA3Type:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: IA3, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> IA3Adapter:
        """Vectors at the linears that the spec chooses."""
        places, ops = _places(view), linears(view)
        missing = spec.unmatched(places)
        if missing:
            raise AdapterError(
                f"ia3 scales no linear layer called {', '.join(map(repr, missing))}",
                hint="target_modules and feedforward_modules name linear layers, the latter some of the former",
            )
        scaled = spec.scaled(places)
        if not scaled.outputs and not scaled.inputs:
            raise AdapterError(
                "ia3 does not know the keys, values and MLPs of this base model's family",
                hint="name them: peft.target_modules, and peft.feedforward_modules for those whose input is scaled",
            )
        outputs, inputs = ([ops[place.name] for place in chosen] for chosen in scaled)
        return IA3Adapter(outputs, inputs, dtype=dtype, device=device)

    def payload(self, spec: IA3, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's IA3."""
        assert isinstance(adapter, IA3Adapter)
        inputs = adapter.inputs
        outputs = adapter.modules.keys() - inputs
        names = view.module_names
        feedforward = _endings(inputs, outputs, names)
        config: dict[str, JsonValue] = {
            "peft_type": "IA3",
            "task_type": "CAUSAL_LM",
            "target_modules": sorted({*feedforward, *target_modules(outputs, names)}),
            "feedforward_modules": feedforward,
            "fan_in_fan_out": any(linears(view)[name].transposed for name in adapter.modules),
            "modules_to_save": None,
            "init_ia3_weights": True,
            "inference_mode": True,
            "revision": None,
        }
        tensors = {
            f"{PREFIX}{name}.ia3_l": exported(_vector(adapter, name), where=name, what="ia3_l").view(
                (1, -1) if name in inputs else (-1, 1)
            )
            for name in sorted(adapter.modules)
        }
        return PeftPayload(config, tensors)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's IA3."""
        config, where = read_config(folder), str(folder / CONFIG_FILE)
        check_keys(config, peft_type="IA3", neutral=_NEUTRAL, harmless=_HARMLESS, where=where)
        read_flag(config, "fan_in_fan_out", where)
        ops = linears(view)
        modules = targeted(config, ops, where=where)
        if not modules:
            raise AdapterError(
                f"target_modules {clip(config.get('target_modules'))} name no linear layer of this model",
                where=where,
                hint=f"the adapter is of another architecture; this one has {', '.join(sorted(ops)[:3])}, ...",
            )
        inputs = _feedforward(config, modules, where)
        layout = {
            f"{PREFIX}{name}.ia3_l": (1, ops[name].in_features) if name in inputs else (ops[name].out_features, 1)
            for name in modules
        }
        stored = read_tensors(folder, config, layout, why_extra=partial(_why_extra, ops), base_sha256=base_sha256)
        values = {key.removeprefix(PREFIX): tensor.flatten() for key, tensor in stored.tensors.items()}
        spec = IA3(target_modules=tuple(sorted(modules)), feedforward_modules=tuple(sorted(inputs)))
        return StoredAdapter(spec, values, stored.base_name, stored.manifest)

    def changes(self, stored: StoredAdapter, view: BackboneView) -> Changes:
        """W and b times l by rows, or W times l by columns."""
        spec = stored.spec
        assert isinstance(spec, IA3)
        scaled, ops = spec.scaled(_places(view)), linears(view)
        changes: dict[str, Callable[[Tensor], Tensor]] = {}
        for place in scaled.outputs:
            scale_O = stored.values[f"{place.name}.ia3_l"]
            changes[f"{place.name}.weight"] = partial(_times, scale_O[:, None])
            if ops[place.name].bias is not None:
                changes[f"{place.name}.bias"] = partial(_times, scale_O)
        for place in scaled.inputs:
            changes[f"{place.name}.weight"] = partial(_times, stored.values[f"{place.name}.ia3_l"])
        return changes


IA3_TYPE = IA3Type()


def _times(scale: Tensor, value: Tensor) -> Tensor:
    return value * scale.to(value)


def _vector(adapter: IA3Adapter, name: str) -> Tensor:
    return adapter.parameters.views[f"{name}.ia3_l"]


def _places(view: BackboneView) -> list[Place]:
    """The attach points as the spec sees them, so that what is built is what it counts."""
    return [
        Place(op.name, "linear", op.roles, op.layer, op.in_features, op.out_features, op.biased)
        for op in linears(view).values()
    ]


def _endings(inputs: Collection[str], outputs: Collection[str], module_names: Collection[str]) -> list[str]:
    """Names for the feed-forward modules. peft matches them by any ending, not at a dot: full paths where that would
    take in one of the others."""
    short = target_modules(inputs, module_names)
    if any(output.endswith(ending) for output in outputs for ending in short):
        return sorted(inputs)
    return short


def _feedforward(config: Mapping[str, JsonValue], modules: Collection[str], where: str) -> frozenset[str]:
    """Those of the targeted modules whose input is scaled, by peft's rule.

    Raises AdapterError where the config does not say: peft would then guess by the family's name.
    """
    names = read_names(config, "feedforward_modules", where)
    if names is None:
        raise AdapterError(
            "feedforward_modules is not set", where=where, hint="list the modules whose input is scaled, or []"
        )
    return frozenset(name for name in modules if name.endswith(tuple(names)))


def _why_extra(attach_points: Collection[str], key: str) -> str:
    named = _TENSOR_NAME.fullmatch(key)
    if named is None:
        return f"only tensors named {PREFIX}MODULE.ia3_l are read"
    if named["module"] not in attach_points:
        return f"the model has no linear layer {clip(named['module'])} that can be adapted"
    return f"target_modules in adapter_config.json do not select {named['module']!r}"
