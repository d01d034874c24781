"""The union of the PEFT specs that train today, and the names it is read from.

`read_peft` picks the member by `type`. A new PEFT type is a spec in this package and an entry in `PEFT_SPECS`; a short
name (`dora` is `lora` with `use_dora`) is an entry in `_SHORT_NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from muxtune.errors import ConfigError
from muxtune.spec.peft.base import PeftBase
from muxtune.spec.peft.bitfit import BitFit
from muxtune.spec.peft.bottleneck import Bottleneck
from muxtune.spec.peft.ia3 import IA3
from muxtune.spec.peft.ln_tuning import LnTuning
from muxtune.spec.peft.lora import Lora
from muxtune.spec.peft.prefix_tuning import PrefixTuning
from muxtune.spec.peft.prompt_tuning import PromptTuning
from muxtune.spec.peft.shira import Shira
from muxtune.spec.scalars import clip, nearest

# A short name, the type it is of, and the key that makes it so with its value as a config would write it.
_SHORT_NAMES: Mapping[str, tuple[str, str, str]] = {
    "dora": ("lora", "use_dora", "true"),
    "rslora": ("lora", "use_rslora", "true"),
    "pissa": ("lora", "init_lora_weights", "pissa"),
    "houlsby": ("bottleneck", "placement", "houlsby"),
    "pfeiffer": ("bottleneck", "placement", "pfeiffer"),
    "parallel": ("bottleneck", "placement", "parallel"),
}

# What other tools call a type: PEFT's name for biases, AdapterHub's for the placements, LLM-Adapters' with a hyphen.
_OTHER_NAMES: Mapping[str, str] = {
    "beft": "bitfit",
    "double_seq_bn": "houlsby",
    "seq_bn": "pfeiffer",
    "par_bn": "parallel",
    "prefix-tuning": "prefix_tuning",
}

PEFT_SPECS: Mapping[str, type[PeftBase]] = {
    "lora": Lora,
    "ia3": IA3,
    "bottleneck": Bottleneck,
    "bitfit": BitFit,
    "ln_tuning": LnTuning,
    "shira": Shira,
    "prefix_tuning": PrefixTuning,
    "prompt_tuning": PromptTuning,
}


def _our_name(type_name: str) -> str:
    name = type_name.lower()
    return _OTHER_NAMES.get(name, name)


def peft_family(type_name: str) -> str:
    """The PEFT type a name stands for: `dora` is of the family `lora`. Unknown names stand for themselves."""
    name = _our_name(type_name)
    return _SHORT_NAMES[name][0] if name in _SHORT_NAMES else name


def short_setting(type_name: str) -> tuple[str, str] | None:
    """What a short name sets, as (key, text): `dora` sets use_dora to true. None for a name that is not short."""
    name = _our_name(type_name)
    return _SHORT_NAMES[name][1:] if name in _SHORT_NAMES else None


def type_name(spec: PeftBase) -> str:
    """What a spec's type is called: by its short name where it has one (`dora`, or `dora+rslora` where it has two)."""
    short = [
        name
        for name, (family, key, text) in _SHORT_NAMES.items()
        if family == spec.type and str(getattr(spec, key)).lower() == text
    ]
    return "+".join(short) or spec.type


def read_peft(value: object) -> object:
    """A PEFT spec from itself, its type's name or a mapping with `type` (lora where it says none)."""
    if isinstance(value, PeftBase):
        return value
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"should be a PEFT type or a mapping with its type, got {clip(value)}")
    given = value.get("type", "lora")
    if not isinstance(given, str):
        raise ConfigError(f"should be the name of a PEFT type, got {clip(given)}", where="type")
    name = peft_family(given)
    if name not in PEFT_SPECS:
        raise _refused_type(given)
    settings = {str(key): item for key, item in value.items() if key != "type"}
    if _our_name(given) in _SHORT_NAMES:
        return _expanded(_our_name(given), settings)
    return PEFT_SPECS[name](**settings)


def _expanded(short: str, settings: Mapping[str, object]) -> PeftBase:
    """The spec that a short name stands for. Raises ConfigError where the settings contradict it."""
    family, key, meant = _SHORT_NAMES[short]
    spec = PEFT_SPECS[family](**{**settings, key: meant})
    if key in settings and PEFT_SPECS[family](**settings) != spec:
        raise ConfigError(
            f"{clip(settings[key])} contradicts type {short}",
            where=key,
            hint=f"leave it out, or say type: {family}",
        )
    return spec


def _refused_type(given: str) -> ConfigError:
    if given.lower() == "qlora":
        return ConfigError("qlora needs a quantised backbone, which is not supported", where="type", hint="type: lora")
    supported = "supported: " + ", ".join((*PEFT_SPECS, *_SHORT_NAMES))
    near = nearest(given, (*PEFT_SPECS, *_SHORT_NAMES))
    hint = f"did you mean {near!r}? {supported}" if near else supported
    return ConfigError(f"unknown PEFT type {given!r}", where="type", hint=hint)


PeftSpec = Annotated[SerializeAsAny[PeftBase], BeforeValidator(read_peft)]
