"""LoRA, rsLoRA and DoRA to and from peft's `LORA`: config keys, tensor names, and folders that anyone may have written.

Legend: R rank, I input features, O output features. A LoRA is x + scale * x A^T B^T with A [R, I], B [O, R], whichever
way round the base keeps its weight (GPT-2's Conv1D included). A DoRA has a magnitude [O] beside each pair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from muxtune.data.manifest import JsonValue, TrainingManifest
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import clip, targeted
from muxtune.peft.convert import PREFIX, AttachPoints, PeftPayload, Shape, exported, target_modules
from muxtune.peft.folder import CONFIG_FILE, read_config, read_tensors
from muxtune.peft.lora_config import MAX_RANK, LoraFormat, parse_lora_config

LoraTensors: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]  # attach point -> (lora_a_RI, lora_b_OR), fp32

_MAGNITUDE = "lora_magnitude_vector"
_TENSOR_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_[AB]\.weight")


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """A LoRA that has been judged sound for one model. `manifest` is None where another tool wrote the folder.

    `magnitudes` [O] by attach point, of a DoRA only.
    """

    form: LoraFormat
    tensors: LoraTensors
    base_name: str | None
    manifest: TrainingManifest | None
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)


def export_lora(
    pairs: LoraTensors,
    form: LoraFormat,
    *,
    module_names: Collection[str],
    magnitudes: Mapping[str, Tensor] | None = None,
) -> PeftPayload:
    """The adapter in peft's format. `module_names`: every module path of the base model; `magnitudes`: of a DoRA.

    Raises:
        AdapterError: the adapter is empty, not finite, or of another rank than `form` says.
    """
    assert (magnitudes or {}).keys() == (pairs.keys() if form.use_dora else set())
    tensors: dict[str, Tensor] = {}
    for name, (lora_a_RI, lora_b_OR) in sorted(pairs.items()):
        if lora_a_RI.shape[0] != form.r or lora_b_OR.shape[1] != form.r:
            raise AdapterError(f"rank differs from r = {form.r}", where=name)
        for kind, tensor in (("lora_A", lora_a_RI), ("lora_B", lora_b_OR)):
            tensors[f"{PREFIX}{name}.{kind}.weight"] = exported(tensor, where=name, what=kind)
        if magnitudes:
            tensors[f"{PREFIX}{name}.{_MAGNITUDE}"] = exported(magnitudes[name], where=name, what=_MAGNITUDE)
    if not tensors:
        raise AdapterError("the adapter has no tensors", hint="check its target_modules")
    return PeftPayload(_lora_config(form, target_modules(pairs, module_names)), tensors)


def _lora_config(form: LoraFormat, targets: list[str]) -> dict[str, JsonValue]:
    """Only the classic keys: an older peft fails on a key that it does not know."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": form.r,
        "lora_alpha": int(form.lora_alpha) if float(form.lora_alpha).is_integer() else form.lora_alpha,
        "lora_dropout": form.lora_dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": form.fan_in_fan_out,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": form.use_rslora,
        "use_dora": form.use_dora,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "revision": None,
    }


def read_lora(
    folder: Path, attach_points: AttachPoints, *, base_sha256: str | None = None, max_rank: int = MAX_RANK
) -> LoadedLora:
    """Read a LoRA folder that anyone may have written, for the model that has `attach_points`.

    Args:
        base_sha256: the hash of the loaded base weights; an adapter whose manifest names another is refused.
        max_rank: the largest rank that is taken.

    Raises:
        AdapterError: whatever is wrong with the folder, before any memory is spent on its tensors.
    """
    config = read_config(folder)
    where = str(folder / CONFIG_FILE)
    form = parse_lora_config(config, where=where, max_rank=max_rank)
    layout = lora_layout(config, form, attach_points, where=where)
    stored = read_tensors(
        folder, config, layout, why_extra=partial(_why_extra, attach_points, form), base_sha256=base_sha256
    )
    names = sorted({named["module"] for named in map(_TENSOR_NAME.fullmatch, stored.tensors) if named})
    values = {key.removeprefix(PREFIX): tensor for key, tensor in stored.tensors.items()}
    pairs = {name: (values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"]) for name in names}
    magnitudes = {name: values[f"{name}.{_MAGNITUDE}"] for name in names} if form.use_dora else {}
    return LoadedLora(form, pairs, stored.base_name, stored.manifest, magnitudes)


def lora_layout(
    config: Mapping[str, JsonValue], form: LoraFormat, attach_points: AttachPoints, *, where: str
) -> dict[str, Shape]:
    """Name and shape of every tensor that an adapter of this config has on this model: no more, no fewer.

    Raises:
        AdapterError: the target modules are a pattern, or name nothing in the model.
    """
    modules = targeted(config, attach_points, where=where)
    if not modules:
        raise AdapterError(
            f"target_modules {clip(config.get('target_modules'))} name no linear layer of this model",
            where=where,
            hint=f"the adapter is of another architecture; this one has {', '.join(sorted(attach_points)[:3])}, ...",
        )
    shapes: dict[str, Shape] = {}
    for name in modules:
        in_features, out_features = attach_points[name]
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (form.r, in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (out_features, form.r)
        if form.use_dora:
            shapes[f"{PREFIX}{name}.{_MAGNITUDE}"] = (out_features,)
    return shapes


def _why_extra(attach_points: AttachPoints, form: LoraFormat, key: str) -> str:
    if _MAGNITUDE in key and not form.use_dora:
        return "it is of a DoRA, and adapter_config.json does not say use_dora"
    if "lora_embedding_" in key:
        return "a LoRA on an embedding is not supported yet"
    named = _TENSOR_NAME.fullmatch(key)
    if named is None:
        return f"only tensors named {PREFIX}MODULE.lora_A.weight or lora_B.weight are read"
    name = named["module"]
    if name not in attach_points:
        return f"the model has no linear layer {clip(name)} that can be adapted"
    return f"target_modules in adapter_config.json do not select {name!r}"
