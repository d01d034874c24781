"""LoRA, rsLoRA and DoRA to and from peft's `LORA`: config keys, tensor names, and folders that anyone may have written.

Legend: R rank, I input features, O output features. A LoRA is x + scale * x A^T B^T with A [R, I], B [O, R], whichever
way round the base keeps its weight (GPT-2's Conv1D included). A DoRA has a magnitude [O] beside each pair. A LoRA on
the token embedding has A [R, V] and B [E, R], for V entries of width E; peft names them without `.weight`.

Where the embedding or the head is adapted, peft saves their base weights beside the adapter, and loads them over the
model's. Such a folder is read if those are the model's own (`_check_base_weights`): they say nothing then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue, TrainingManifest
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import clip, targeted
from muxtune.peft.base import EndBase
from muxtune.peft.convert import PREFIX, AttachPoints, PeftPayload, Shape, exported, target_modules
from muxtune.peft.folder import CONFIG_FILE, WEIGHTS_FILE, read_config, read_tensors
from muxtune.peft.lora_config import MAX_RANK, LoraFormat, parse_lora_config

LoraTensors: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]  # attach point -> (lora_a_RI, lora_b_OR), fp32

_MAGNITUDE = "lora_magnitude_vector"
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_TENSOR_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """A LoRA that has been judged sound for one model. `manifest` is None where another tool wrote the folder.

    `magnitudes` [O] by attach point, of a DoRA only; `embedding`: the pair at the token embedding, by its name.
    """

    form: LoraFormat
    tensors: LoraTensors
    base_name: str | None
    manifest: TrainingManifest | None
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    embedding: LoraTensors = field(default_factory=dict)


def export_lora(
    pairs: LoraTensors,
    form: LoraFormat,
    *,
    module_names: Collection[str],
    magnitudes: Mapping[str, Tensor] | None = None,
    embedding: LoraTensors | None = None,
) -> PeftPayload:
    """The adapter in peft's format. `module_names`: every module path of the base model; `magnitudes`: of a DoRA;
    `embedding`: the pair at the token embedding, by its name.

    Raises:
        AdapterError: the adapter is empty, not finite, or of another rank than `form` says.
    """
    embedding = embedding or {}
    assert (magnitudes or {}).keys() == (pairs.keys() if form.use_dora else set())
    tensors: dict[str, Tensor] = {}
    for name, (lora_a_RI, lora_b_OR) in sorted(pairs.items()):
        if lora_a_RI.shape[0] != form.r or lora_b_OR.shape[1] != form.r:
            raise AdapterError(f"rank differs from r = {form.r}", where=name)
        for kind, tensor in (("lora_A", lora_a_RI), ("lora_B", lora_b_OR)):
            tensors[f"{PREFIX}{name}.{kind}.weight"] = exported(tensor, where=name, what=kind)
        if magnitudes:
            tensors[f"{PREFIX}{name}.{_MAGNITUDE}"] = exported(magnitudes[name], where=name, what=_MAGNITUDE)
    for name, pair in embedding.items():
        if pair[0].shape[0] != form.r or pair[1].shape[1] != form.r:
            raise AdapterError(f"rank differs from r = {form.r}", where=name)
        for kind, tensor in zip(_EMBEDDING, pair, strict=True):
            tensors[f"{PREFIX}{name}.{kind}"] = exported(tensor, where=name, what=kind)
    if not tensors:
        raise AdapterError("the adapter has no tensors", hint="check its target_modules")
    return PeftPayload(_lora_config(form, target_modules([*pairs, *embedding], module_names)), tensors)


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
    folder: Path,
    attach_points: AttachPoints,
    *,
    ends: Mapping[str, EndBase] | None = None,
    base_sha256: str | None = None,
    max_rank: int = MAX_RANK,
) -> LoadedLora:
    """Read a LoRA folder that anyone may have written, for the model that has `attach_points`.

    Args:
        ends: the model's token embedding and head.
        base_sha256: the hash of the loaded base weights; an adapter whose manifest names another is refused.
        max_rank: the largest rank that is taken.

    Raises:
        AdapterError: whatever is wrong with the folder, before any memory is spent on its tensors.
    """
    config = read_config(folder)
    where = str(folder / CONFIG_FILE)
    form = parse_lora_config(config, where=where, max_rank=max_rank)
    ends = ends or {}
    layout = lora_layout(config, form, attach_points, ends, where=where)
    optional = _base_weights(layout, ends)
    stored = read_tensors(
        folder,
        config,
        layout,
        why_extra=partial(_why_extra, attach_points, ends, form),
        base_sha256=base_sha256,
        optional=optional,
    )
    _check_base_weights(stored.tensors, ends, where=str(folder / WEIGHTS_FILE))
    named = {match["module"] for match in map(_TENSOR_NAME.fullmatch, stored.tensors) if match}
    values = {key.removeprefix(PREFIX): tensor for key, tensor in stored.tensors.items()}
    looked_up = sorted(name for name in named if name in ends and ends[name].kind == "embedding")
    names = sorted(named.difference(looked_up))
    pairs = {name: (values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"]) for name in names}
    magnitudes = {name: values[f"{name}.{_MAGNITUDE}"] for name in names} if form.use_dora else {}
    embedding = {name: (values[f"{name}.{_EMBEDDING[0]}"], values[f"{name}.{_EMBEDDING[1]}"]) for name in looked_up}
    return LoadedLora(form, pairs, stored.base_name, stored.manifest, magnitudes, embedding)


def lora_layout(
    config: Mapping[str, JsonValue],
    form: LoraFormat,
    attach_points: AttachPoints,
    ends: Mapping[str, EndBase],
    *,
    where: str,
) -> dict[str, Shape]:
    """Name and shape of every tensor that an adapter of this config has on this model: no more, no fewer.

    Raises:
        AdapterError: the target modules are a pattern, or name nothing in the model.
    """
    modules = targeted(config, {**attach_points, **ends}, where=where, named_only=ends)
    if not modules:
        raise AdapterError(
            f"target_modules {clip(config.get('target_modules'))} name no linear layer of this model",
            where=where,
            hint=f"the adapter is of another architecture; this one has {', '.join(sorted(attach_points)[:3])}, ...",
        )
    adapted = [name for name in modules if name in ends]
    if form.use_dora and adapted:
        raise AdapterError(f"a DoRA on {adapted[0]!r} is not supported: it is the embedding or the head", where=where)
    shapes: dict[str, Shape] = {}
    for name in modules:
        if name in ends and ends[name].kind == "embedding":
            shapes[f"{PREFIX}{name}.{_EMBEDDING[0]}"] = (form.r, ends[name].in_features)
            shapes[f"{PREFIX}{name}.{_EMBEDDING[1]}"] = (ends[name].out_features, form.r)
            continue
        sizes = (ends[name].in_features, ends[name].out_features) if name in ends else attach_points[name]
        in_features, out_features = sizes
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (form.r, in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (out_features, form.r)
        if form.use_dora:
            shapes[f"{PREFIX}{name}.{_MAGNITUDE}"] = (out_features,)
    return shapes


def _base_weights(layout: Mapping[str, Shape], ends: Mapping[str, EndBase]) -> dict[str, Shape]:
    """What peft may have saved of the base model: the weights of those ends that the adapter is on."""
    return {
        _base_weight(name): tuple(op.table.shape)
        for name, op in ends.items()
        if any(key.startswith(f"{PREFIX}{name}.") for key in layout)
    }


def _base_weight(name: str) -> str:
    return f"{PREFIX}{name}.base_layer.weight"


def _check_base_weights(tensors: Mapping[str, Tensor], ends: Mapping[str, EndBase], *, where: str) -> None:
    """Raises AdapterError where a saved base weight is not the model's own, but for the precision of either. A model
    that was never loaded has none to compare with; who goes on with such a reading loads it in the end."""
    for name, op in ends.items():
        saved = tensors.get(_base_weight(name))
        if saved is None or op.table.is_meta:
            continue
        own = op.table.to(saved.device)
        if not torch.equal(own.to(saved.dtype), saved) and not torch.equal(own, saved.to(own.dtype)):
            raise AdapterError(
                f"{_base_weight(name)!r} is not the weight of this base model: peft would load it over the model's",
                where=where,
                hint="load the base model that it was trained on, or save it with save_embedding_layers=False",
            )


def _why_extra(attach_points: AttachPoints, ends: Mapping[str, EndBase], form: LoraFormat, key: str) -> str:
    if _MAGNITUDE in key and not form.use_dora:
        return "it is of a DoRA, and adapter_config.json does not say use_dora"
    if key.endswith(".base_layer.weight"):
        return "a weight of the base model is read (and compared) only beside an adapter on the embedding or the head"
    named = _TENSOR_NAME.fullmatch(key)
    if named is None:
        return f"only tensors named {PREFIX}MODULE.lora_A.weight or lora_B.weight (or lora_embedding_A, _B) are read"
    name = named["module"]
    if name not in attach_points and name not in ends:
        return f"the model has no linear layer {clip(name)} that can be adapted"
    return f"target_modules in adapter_config.json do not select {name!r}"
