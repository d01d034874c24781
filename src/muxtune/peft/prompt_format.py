"""What peft's folders of learned positions share (PREFIX_TUNING, PROMPT_TUNING): one tensor, `prompt_embeddings`.

The boundary: config keys and the tensor's shape; what its numbers mean is the type's business. The geometry that peft
writes into the config must be the model's. Source: peft's `PromptLearningConfig` and its saved state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import Neutral, check_keys, clip
from muxtune.peft.convert import PeftPayload, exported
from muxtune.peft.folder import CONFIG_FILE, StoredTensors, read_config, read_tensors

TENSOR = "prompt_embeddings"
MAX_POSITIONS = 65536
_NEUTRAL: Neutral = {"num_transformer_submodules": ((None, 1), "decoders have one")}
_GEOMETRY = ("token_dim", "num_attention_heads", "num_layers")


@dataclass(frozen=True, slots=True)
class Geometry:
    """peft's words for the model: the width of a position, and how it is divided; `columns` a position in the file."""

    token_dim: int
    num_attention_heads: int
    num_layers: int
    columns: int


def prompt_payload(
    peft_type: str, prompt_PX: Tensor, geometry: Geometry, settings: Mapping[str, JsonValue]
) -> PeftPayload:
    """The folder of P learned positions. Raises AdapterError where they are not finite."""
    config: dict[str, JsonValue] = {
        "peft_type": peft_type,
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": prompt_PX.shape[0],
        "token_dim": geometry.token_dim,
        "num_transformer_submodules": 1,
        "num_attention_heads": geometry.num_attention_heads,
        "num_layers": geometry.num_layers,
        **settings,
        "inference_mode": True,
        "revision": None,
    }
    return PeftPayload(config, {TENSOR: exported(prompt_PX, where=peft_type, what=TENSOR)})


def read_prompt(
    folder: Path, peft_type: str, geometry: Geometry, *, harmless: Collection[str], base_sha256: str | None
) -> StoredTensors:
    """The one tensor [P, columns] of a folder that anyone may have written.

    Args:
        harmless: keys of the type that say how training began, or how it went.

    Raises:
        AdapterError: whatever is wrong with the folder, before any memory is spent on the tensor.
    """
    config, where = read_config(folder), str(folder / CONFIG_FILE)
    known = {*harmless, *_GEOMETRY, "num_virtual_tokens"}
    check_keys(config, peft_type=peft_type, neutral=_NEUTRAL, harmless=known, where=where)
    for key in _GEOMETRY:
        ours, theirs = getattr(geometry, key), config.get(key)
        if theirs is not None and (type(theirs) is not int or theirs != ours):
            raise AdapterError(
                f"{key} is {clip(theirs)}, this model's is {ours}",
                where=where,
                hint="it is an adapter of another model",
            )
    count = config.get("num_virtual_tokens")
    if type(count) is not int or not 1 <= count <= MAX_POSITIONS:
        raise AdapterError(f"num_virtual_tokens must be from 1 to {MAX_POSITIONS}, not {clip(count)}", where=where)
    return read_tensors(
        folder, config, {TENSOR: (count, geometry.columns)}, why_extra=_why_extra, base_sha256=base_sha256
    )


def _why_extra(_: str) -> str:
    return f"only the tensor {TENSOR} is read"
