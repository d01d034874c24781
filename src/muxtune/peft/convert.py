"""LoRA adapters to and from the format of Hugging Face peft: config keys, tensor names, target modules.

The boundary: values in, values out; files are `folder.py`'s business. An import is judged on names, dtypes and shapes
(`lora_layout`) before any data is read. Source: peft's tensor names and its suffix matching of target modules.

Legend: R rank, I input features, O output features. A LoRA is x + scale * x A^T B^T with A [R, I], B [O, R], whichever
way round the base keeps its weight (GPT-2's Conv1D included).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.lora_config import LoraFormat, clip, suffixes, targeted
from muxtune.peft.untrusted import TensorInfo

LoraTensors: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]  # attach point -> (lora_a_RI, lora_b_OR), fp32
AttachPoints: TypeAlias = Mapping[str, tuple[int, int]]  # full module path -> (in features, out features)
Shape: TypeAlias = tuple[int, ...]

PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_[AB]\.weight")
_WEIGHT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class PeftPayload:
    """What goes into `adapter_config.json` (base name excepted) and `adapter_model.safetensors`, for any PEFT type."""

    config: Mapping[str, JsonValue]
    tensors: Mapping[str, Tensor]


def export_lora(adapter: LoraTensors, form: LoraFormat, *, module_names: Collection[str]) -> PeftPayload:
    """The adapter in peft's format. `module_names`: every module path of the base model.

    Raises:
        AdapterError: the adapter is empty, not finite, or of another rank than `form` says.
    """
    tensors: dict[str, Tensor] = {}
    for name, (lora_a_RI, lora_b_OR) in sorted(adapter.items()):
        if lora_a_RI.shape[0] != form.r or lora_b_OR.shape[1] != form.r:
            raise AdapterError(f"rank differs from r = {form.r}", where=name)
        for kind, tensor in (("lora_A", lora_a_RI), ("lora_B", lora_b_OR)):
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterError(f"{kind} holds NaN or infinity", where=name, hint="export an earlier checkpoint")
            tensors[f"{PREFIX}{name}.{kind}.weight"] = _own(tensor)
    if not tensors:
        raise AdapterError("the adapter has no tensors", hint="check its target_modules")
    return PeftPayload(_lora_config(form, target_modules(adapter, module_names)), tensors)


def _own(tensor: Tensor) -> Tensor:
    """A copy of its own: an adapter's tensors may be views of one buffer, which safetensors takes for shared memory."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


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
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "revision": None,
    }


def target_modules(targets: Collection[str], module_names: Collection[str]) -> list[str]:
    """Literal names by which peft finds exactly `targets` among `module_names` (it matches whole-component suffixes).

    The shortest suffix without a layer number that matches nothing else, or else the full path. Cost: O(modules).
    """
    wanted = set(targets)
    unwanted = {suffix for name in module_names if name not in wanted for suffix in suffixes(name)}
    chosen = set()
    for name in wanted:
        exact = (suffix for suffix in suffixes(name) if _number_free(suffix) and suffix not in unwanted)
        chosen.add(next(exact, name))
    if chosen & unwanted:
        raise AdapterError(f"another module's name ends in {min(chosen & unwanted)!r}, peft would adapt that one too")
    return sorted(chosen)


def _number_free(suffix: str) -> bool:
    return not any(part.isdigit() for part in suffix.split("."))


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
    return shapes


def check_layout(
    found: Mapping[str, TensorInfo], layout: Mapping[str, Shape], attach_points: AttachPoints, *, where: str
) -> None:
    """Raises AdapterError unless the header holds exactly the tensors of `layout`, in a dtype of weights."""
    extra = sorted(set(found) - set(layout))
    if extra:
        raise AdapterError(
            f"{len(extra)} tensors do not fit this model and config, the first is {clip(extra[0])}",
            where=where,
            hint=_why_extra(extra[0], attach_points),
        )
    missing = sorted(set(layout) - set(found))
    if missing:
        raise AdapterError(
            f"{len(missing)} tensors are missing, the first is {missing[0]!r}",
            where=where,
            hint="the file is not complete, or target_modules name more than was saved",
        )
    for name, info in found.items():
        if info.dtype not in _WEIGHT_DTYPES:
            raise AdapterError(f"{name!r} is {info.dtype}, not one of {', '.join(_WEIGHT_DTYPES)}", where=where)
        if info.shape != layout[name]:
            raise AdapterError(
                f"{name!r} is {list(info.shape)}, this model and r in adapter_config.json need {list(layout[name])}",
                where=where,
                hint="r is not the rank of the tensors, or the adapter is of a model of another size",
            )


def _why_extra(key: str, attach_points: AttachPoints) -> str:
    if "lora_magnitude_vector" in key:
        return "it is of a DoRA, which is not supported yet"
    if "lora_embedding_" in key:
        return "a LoRA on an embedding is not supported yet"
    named = _TENSOR_NAME.fullmatch(key)
    if named is None:
        return "only tensors named base_model.model.MODULE.lora_A.weight or lora_B.weight are read"
    name = named["module"]
    if name not in attach_points:
        return f"the model has no linear layer {clip(name)} that can be adapted"
    return f"target_modules in adapter_config.json do not select {name!r}"


def import_lora(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Tensors of a `lora_layout` by attach point, in fp32."""
    names = sorted({named["module"] for named in map(_TENSOR_NAME.fullmatch, tensors) if named})
    return {
        name: (
            tensors[f"{PREFIX}{name}.lora_A.weight"].float().contiguous(),
            tensors[f"{PREFIX}{name}.lora_B.weight"].float().contiguous(),
        )
        for name in names
    }
