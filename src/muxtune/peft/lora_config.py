"""A LoRA's `adapter_config.json`, as a stranger may have written it.

The boundary: the config alone; what it says about tensors is compared with them in `convert.py`. What the configs of
all types share is in `adapter_config.py`. Source of the keys: peft's `LoraConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import Neutral, check_keys, clip, read_flag, read_number

MAX_RANK = 1024


@dataclass(frozen=True, slots=True)
class LoraFormat:
    """The numbers of a LoRA that its tensors do not hold.

    `fan_in_fan_out`: the base keeps its weights [in, out], as GPT-2's Conv1D does; the tensors are the same either way.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


_NEUTRAL: Neutral = {
    "bias": (("none",), "trained biases are not LoRA weights"),
    "lora_bias": ((None, False), "a bias on lora_B is not supported"),
    "init_lora_weights": (
        (None, True, False, "gaussian", "orthogonal"),
        "this initialisation may have changed the base model's own weights; convert it to plain LoRA with peft",
    ),
    "layer_replication": ((None, []), "the backbone's layers are not copied"),
    "ensure_weight_tying": ((None, False), "adapters of the embedding and of the head are two, tied weights or not"),
    "rank_pattern": ((None, {}), "one rank for all modules is needed"),
    "alpha_pattern": ((None, {}), "one alpha for all modules is needed"),
}
# Numbers that are read below, and defaults of features that another key turns on.
_HARMLESS = frozenset(
    {
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "fan_in_fan_out",
        "megatron_core",
        "qalora_group_size",
    }
)


def parse_lora_config(config: Mapping[str, JsonValue], *, where: str, max_rank: int = MAX_RANK) -> LoraFormat:
    """The format that an untrusted `adapter_config.json` describes.

    Raises:
        AdapterError: a key is unknown and set, or has a value that is not supported; it is named.
    """
    check_keys(config, peft_type="LORA", neutral=_NEUTRAL, harmless=_HARMLESS, where=where)
    return LoraFormat(
        r=_rank(config.get("r"), max_rank, where),
        lora_alpha=read_number(config, "lora_alpha", 8.0, 1e-6, 1e6, where),
        lora_dropout=read_number(config, "lora_dropout", 0.0, 0.0, 1.0, where),
        use_rslora=read_flag(config, "use_rslora", where),
        use_dora=read_flag(config, "use_dora", where),
        fan_in_fan_out=read_flag(config, "fan_in_fan_out", where),
    )


def _rank(value: JsonValue, max_rank: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max_rank:
        raise AdapterError(f"r must be an integer from 1 to {max_rank}, not {clip(value)}", where=where)
    return value
