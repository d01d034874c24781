"""Which PEFT spec is made by which PEFT type: the one table that a new type is entered in.

A type is one module of this package with an object that satisfies `PeftType`, and a spec in `muxtune.spec.peft`.
Everything outside this package goes through the functions below, and never asks which type it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import clip
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.bitfit import BITFIT
from muxtune.peft.bottleneck import BOTTLENECK
from muxtune.peft.convert import PeftPayload
from muxtune.peft.folder import CONFIG_FILE, read_config
from muxtune.peft.ia3_type import IA3_TYPE
from muxtune.peft.ln_tuning import LN_TUNING
from muxtune.peft.lora_type import LORA
from muxtune.peft.prefix_tuning import PREFIX_TUNING
from muxtune.peft.prompt_tuning import PROMPT_TUNING
from muxtune.peft.shira import SHIRA
from muxtune.peft.stored import Changes, StoredAdapter
from muxtune.spec.peft import (
    IA3,
    BitFit,
    Bottleneck,
    LnTuning,
    Lora,
    PeftBase,
    PrefixTuning,
    PromptTuning,
    Shira,
    type_name,
)
from muxtune.spec.peft.targets import refuse_ends


class PeftType(Protocol):
    """What a PEFT type must be able to do with its spec. `spec` is always of the class it is registered under."""

    def build(self, spec: Any, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device) -> Adapter:
        """A fresh adapter that leaves the backbone's function as it is, unless its method says otherwise (a prefix, a
        prompt); its start depends on `seed` and names alone.

        `dtype` is that of the parameters. Raises AdapterError where a target matches nothing, or where the family has
        no place for the type.
        """
        ...

    def payload(self, spec: Any, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """The adapter as `adapter_config.json` and tensors: peft's format where peft has the type."""
        ...

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """An adapter folder of this type, which is untrusted input.

        Raises AdapterError for whatever is wrong with it, before any memory is spent on its tensors.
        """
        ...


@runtime_checkable
class MergeableType(Protocol):
    """A PEFT type whose adapters are changes of the base model's own parameters, and so can be merged into them."""

    def changes(self, stored: StoredAdapter, view: BackboneView) -> Changes:
        """What the adapter makes of each parameter that it changes.

        Raises AdapterError where the base model has no such parameter (a bias of a linear without one).
        """
        ...


TYPES: Mapping[type, PeftType] = {
    Lora: LORA,
    IA3: IA3_TYPE,
    PrefixTuning: PREFIX_TUNING,
    PromptTuning: PROMPT_TUNING,
    Bottleneck: BOTTLENECK,
    BitFit: BITFIT,
    LnTuning: LN_TUNING,
    Shira: SHIRA,
}
READERS: Mapping[str, PeftType] = {  # by the peft_type of adapter_config.json
    "LORA": LORA,
    "IA3": IA3_TYPE,
    "PREFIX_TUNING": PREFIX_TUNING,
    "PROMPT_TUNING": PROMPT_TUNING,
    "MUXTUNE_BOTTLENECK": BOTTLENECK,
    "MUXTUNE_BITFIT": BITFIT,
    "BEFT": BITFIT,
    "LN_TUNING": LN_TUNING,
    "SHIRA": SHIRA,
}


def build_adapter(
    spec: PeftBase, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """A fresh adapter of any type. `dtype` is the backbone's; parameters are never below float32.

    Raises AdapterError as `PeftType.build`, and where the spec names the embedding or the head and its type has no
    place there.
    """
    refuse_ends(spec, view.places)
    precise = torch.promote_types(dtype, torch.float32)
    return TYPES[type(spec)].build(spec, view, seed=seed, dtype=precise, device=device)


def payload(spec: PeftBase, adapter: Adapter, view: BackboneView) -> PeftPayload:
    """See `PeftType.payload`."""
    return TYPES[type(spec)].payload(spec, adapter, view)


def read_stored(folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
    """An adapter folder of any type that is known here. Raises AdapterError."""
    config = read_config(folder)
    named = config.get("peft_type")
    found = READERS.get(named) if isinstance(named, str) else None
    if found is None:
        raise AdapterError(
            f"peft_type {named!r} is not supported",
            where=str(folder / CONFIG_FILE),
            hint="supported: " + ", ".join(sorted(READERS)),
        )
    return found.read(folder, view, base_sha256=base_sha256)


def changes(stored: StoredAdapter, view: BackboneView) -> Changes:
    """See `MergeableType.changes`. Raises AdapterError for a type that is no change of parameters."""
    kind = TYPES[type(stored.spec)]
    if not isinstance(kind, MergeableType):
        raise AdapterError(
            f"a {type_name(stored.spec)} adapter cannot be merged: it is more than other values of the base model's "
            "weights",
            hint="use it beside the base model: --format peft",
        )
    return kind.changes(stored, view)


def is_mergeable(peft_type: object) -> bool:
    """Whether adapters of this `peft_type` of adapter_config.json are changes of parameters."""
    return isinstance(peft_type, str) and isinstance(READERS.get(peft_type), MergeableType)


def start_from(spec: PeftBase, adapter: Adapter, folder: Path, view: BackboneView, *, base_sha256: str | None) -> None:
    """Give a fresh adapter the values of a folder, which must be the adapter that `spec` describes."""
    stored = read_stored(folder, view, base_sha256=base_sha256)
    ours, theirs = _settings(spec, view), _settings(stored.spec, view)
    differing = {key: value for key, value in theirs.items() if key in ours and ours[key] != value}
    if differing:
        told = "; ".join(f"{key}: {clip(value)}, the job's is {clip(ours[key])}" for key, value in differing.items())
        fields = type(stored.spec).model_fields
        own = {key: theirs[key] for key in theirs.keys() - ours.keys() if theirs[key] != fields[key].default}
        raise AdapterError(
            f"it is another adapter than the job's peft says ({told})",
            where=str(folder),
            hint=_how_to_go_on({"type": stored.spec.type, **differing, **own}),
        )
    give(adapter, stored.values, where=str(folder))


def give(adapter: Adapter, values: Mapping[str, Tensor], *, where: str) -> None:
    """Put `values` (by the names of its state) into an adapter. Raises AdapterError where names or shapes differ."""
    own = {name: shape for name, (shape, _) in adapter.layout.items()}
    theirs = {name: value.shape for name, value in values.items()}
    if own != theirs:
        differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise AdapterError(
            f"it has other parameters than the job's adapter: {', '.join(differing[:3])}, {len(differing)} in all",
            where=where,
            hint="set the job's peft to the folder's: its size and its target_modules",
        )
    adapter.load(values)


def _settings(spec: PeftBase, view: BackboneView) -> dict[str, Any]:
    """Each setting that decides what the parameters mean, resolved for this base model: dropout and targets do not
    (what the targets come to is compared by the names of the parameters)."""
    said = spec.resolved(view.places).model_dump()
    return {key: value for key, value in said.items() if "dropout" not in key and "target_modules" not in key}


def _how_to_go_on(settings: Mapping[str, Any]) -> str:
    """The folder's settings as they are written in a config; lists of modules are in its own config."""
    said = [f"{key}: {_written(value)}" for key, value in settings.items() if not key.endswith("_modules")]
    lists = [key for key in settings if key.endswith("_modules")]
    beside = f", and {' and '.join(lists)} to those of its {CONFIG_FILE}" if lists else ""
    return f"set the job's peft to the folder's: {{{', '.join(said)}}}{beside}"


def _written(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value).strip('"')
