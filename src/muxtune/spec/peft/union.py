"""The union of the PEFT specs that train today, and the names it is read from.

`read_peft` picks the member by `type`. A new PEFT type is a spec in this package and an entry in `PEFT_SPECS`; a short
name (`dora` is a kind of `lora`) is an entry in `SHORT_NAMES`. Names that config.md knows and nothing implements yet
are refused as such, not as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from muxtune.errors import ConfigError
from muxtune.spec.peft.base import PeftBase
from muxtune.spec.peft.lora import Lora
from muxtune.spec.scalars import clip, nearest

_SHORT_NAMES: Mapping[str, str] = {
    "dora": "lora",
    "rslora": "lora",
    "pissa": "lora",
    "houlsby": "bottleneck",
    "pfeiffer": "bottleneck",
    "parallel": "bottleneck",
}
_LATER = ("ia3", "prefix_tuning", "prompt_tuning", "bottleneck", "bitfit", "ln_tuning", "shira")

PEFT_SPECS: Mapping[str, type[PeftBase]] = {"lora": Lora}


def peft_family(type_name: str) -> str:
    """The PEFT type a name stands for: `dora` is of the family `lora`. Unknown names stand for themselves."""
    name = type_name.lower()
    return _SHORT_NAMES.get(name, name)


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
    name = given.lower()
    if name not in PEFT_SPECS:
        raise _refused_type(given)
    return PEFT_SPECS[name](**{**{str(key): item for key, item in value.items()}, "type": name})


def _refused_type(given: str) -> ConfigError:
    supported = "supported: " + ", ".join(PEFT_SPECS)
    known = (*PEFT_SPECS, *_LATER, *_SHORT_NAMES)
    if given.lower() in known:
        return ConfigError(f"PEFT type {given!r} is not supported yet", where="type", hint=supported)
    near = nearest(given, known)
    hint = f"did you mean {near!r}? {supported}" if near else supported
    return ConfigError(f"unknown PEFT type {given!r}", where="type", hint=hint)


PeftSpec = Annotated[SerializeAsAny[PeftBase], BeforeValidator(read_peft)]
