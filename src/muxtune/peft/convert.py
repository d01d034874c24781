"""Adapters to and from the format of Hugging Face peft: what the types at named modules share.

The boundary: values in, values out; files are `folder.py`'s business. An import is judged on names, dtypes and shapes
(`check_layout`) before any data is read. Source: peft's tensor names and its suffix matching of target modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import suffixes
from muxtune.peft.untrusted import TensorInfo

AttachPoints: TypeAlias = Mapping[str, tuple[int, int]]  # full module path -> (in features, out features)
Shape: TypeAlias = tuple[int, ...]

PREFIX = "base_model.model."
_WEIGHT_DTYPES = ("F32", "F16", "BF16")
_INTEGER_DTYPES = ("I32", "I64", "F32")  # peft on Windows saves integers as floats


@dataclass(frozen=True, slots=True)
class PeftPayload:
    """What goes into `adapter_config.json` (base name excepted) and `adapter_model.safetensors`, for any PEFT type."""

    config: Mapping[str, JsonValue]
    tensors: Mapping[str, Tensor]


def exported(tensor: Tensor, *, where: str, what: str) -> Tensor:
    """A copy of its own, fp32 on the CPU: safetensors takes views of one buffer for shared memory.

    Raises AdapterError where it is not finite.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterError(f"{what} holds NaN or infinity", where=where, hint="export an earlier checkpoint")
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


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


def check_layout(
    found: Mapping[str, TensorInfo],
    layout: Mapping[str, Shape],
    *,
    why_extra: Callable[[str], str],
    where: str,
    integers: Collection[str] = (),
    optional: Mapping[str, Shape] | None = None,
) -> None:
    """Raises AdapterError unless the header holds exactly the tensors of `layout`, and perhaps some of `optional`, in a
    dtype of weights, or of whole numbers where they are among `integers`.

    `why_extra` says in words why a tensor of that name is none of them.
    """
    known = {**layout, **(optional or {})}
    extra = sorted(set(found) - set(known))
    if extra:
        raise AdapterError(
            f"{len(extra)} tensors do not fit this model and config, the first is {extra[0][:80]!r}",
            where=where,
            hint=why_extra(extra[0]),
        )
    missing = sorted(set(layout) - set(found))
    if missing:
        raise AdapterError(
            f"{len(missing)} tensors are missing, the first is {missing[0]!r}",
            where=where,
            hint="the file is not complete, or adapter_config.json names more than was saved",
        )
    for name, info in found.items():
        allowed = _INTEGER_DTYPES if name in integers else _WEIGHT_DTYPES
        if info.dtype not in allowed:
            raise AdapterError(f"{name!r} is {info.dtype}, not one of {', '.join(allowed)}", where=where)
        if info.shape != known[name]:
            raise AdapterError(
                f"{name!r} is {list(info.shape)}, this model and adapter_config.json need {list(known[name])}",
                where=where,
                hint="the config is not that of the tensors, or the adapter is of a model of another size",
            )
