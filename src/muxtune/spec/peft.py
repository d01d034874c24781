"""PEFT specs: which adapter a job trains, and what it costs, from attach-point shapes alone.

`PeftSpec` is the union of the specs that train today; `read_peft` picks the member by `type`. A new PEFT type is a
class here, its name moved from `_LATER` to `PEFT_SPECS`, and an arm of the union. Costs need no model and no torch, so
the planner can weigh a job on a laptop. A shape is (in_features, out_features) of one attach point.

The other names that config.md knows, short names of a family (`dora` is a kind of `lora`) among them, are refused as
not supported yet rather than unknown.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.border import Spec
from muxtune.spec.scalars import Integer, Number, clip, nearest, read_flag

AttachShape = tuple[int, int]  # (in_features, out_features)

ADAPTER_BYTES_PER_PARAMETER = 4 * 4  # fp32: the parameter, its gradient and AdamW's two moments
ALL_LINEAR = "all-linear"

_MODULE_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_SHORT_NAMES: Mapping[str, str] = {
    "dora": "lora",
    "rslora": "lora",
    "pissa": "lora",
    "houlsby": "bottleneck",
    "pfeiffer": "bottleneck",
    "parallel": "bottleneck",
}
_LATER = ("ia3", "prefix_tuning", "prompt_tuning", "bottleneck", "bitfit", "ln_tuning", "shira")


class PeftBase(Spec, ABC):
    """What every PEFT spec tells the planner."""

    default_learning_rate: ClassVar[float]

    @abstractmethod
    def parameters(self, shapes: Iterable[AttachShape]) -> int:
        """Trainable parameters over the attach points."""

    @abstractmethod
    def flops_per_token(self, shapes: Iterable[AttachShape]) -> int:
        """Floating-point operations of one trained token, forward and backward, beyond the backbone's own."""

    def state_bytes(self, shapes: Iterable[AttachShape]) -> int:
        """Memory that the task holds while it trains: parameters, gradients and moments, activations not counted."""
        return ADAPTER_BYTES_PER_PARAMETER * self.parameters(shapes)

    @property
    def virtual_rows(self) -> int:
        """Rows that the adapter adds to each sequence (prompt tuning)."""
        return 0

    @property
    def prefix_length(self) -> int:
        """Learned key/value positions before each sequence (prefix tuning)."""
        return 0


def _read_targets(value: object) -> object:
    """`all-linear`, or module names as a list or with commas: literal suffixes or full names, never patterns."""
    if isinstance(value, str):
        if value.strip().lower() in ("all", ALL_LINEAR):
            return ALL_LINEAR
        value = value.split(",")
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"should be {ALL_LINEAR!r} or a list of module names, got {clip(value)}")
    return tuple(dict.fromkeys(_read_module_name(name) for name in value))


def _read_module_name(value: object) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if not _MODULE_NAME.fullmatch(name) or len(name) > 256:
        raise ConfigError(
            f"should be the name of a module, got {clip(value)}",
            hint="a literal suffix such as q_proj or a full name; patterns are not read",
        )
    return name


class Lora(PeftBase):
    """Low-rank adaptation (Hu et al. 2021): y = W x + (lora_alpha / r) B A dropout(x)."""

    default_learning_rate = 2e-4

    type: Literal["lora"] = "lora"
    r: Annotated[Integer, Field(ge=1, le=65536)] = 8
    lora_alpha: Annotated[Number, Field(gt=0)] = 16
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0
    target_modules: Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_read_targets)] = "all-linear"

    @model_validator(mode="before")
    @classmethod
    def _refuse_variants(cls, data: object) -> object:
        """LoRA's kin are named by these keys; at their plain value they say nothing, at another they are to come."""
        if not isinstance(data, dict):
            return data
        for key in ("use_dora", "use_rslora"):
            if key in data and read_flag(data[key]):
                raise ConfigError("is not supported yet", where=key, hint="supported: plain lora")
        if str(data.get("init_lora_weights", True)).lower() != "true":
            raise ConfigError(
                f"{clip(data['init_lora_weights'])} is not supported yet",
                where="init_lora_weights",
                hint="supported: true",
            )
        return {k: v for k, v in data.items() if k not in ("use_dora", "use_rslora", "init_lora_weights")}

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.r

    def parameters(self, shapes: Iterable[AttachShape]) -> int:
        return sum(self.r * (inputs + outputs) for inputs, outputs in shapes)

    def flops_per_token(self, shapes: Iterable[AttachShape]) -> int:
        # A multiply-add is 2; forward, the input's gradient and the parameters' gradient cost the same product each.
        return 3 * 2 * self.parameters(shapes)


PEFT_SPECS: Mapping[str, type[Lora]] = {"lora": Lora}


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


PeftSpec = Annotated[Lora, BeforeValidator(read_peft)]
