"""Which PEFT spec is made by which PEFT type: the one table that a new type is entered in.

A type is one module of this package with an object that satisfies `PeftType`, and a spec in `muxtune.spec.peft`.
Everything outside this package goes through the functions below, and never asks which type it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from muxtune.errors import AdapterError
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


def start_from(spec: PeftBase, adapter: Adapter, folder: Path, view: BackboneView, *, base_sha256: str | None) -> None:
    """Give a fresh adapter the values of a folder, which must be the adapter that `spec` describes."""
    stored = read_stored(folder, view, base_sha256=base_sha256)
    differing = [
        f"{key}: {theirs!r}, the job's is {ours!r}"
        for key, ours, theirs in _settings(spec, stored.spec)
        if ours != theirs
    ]
    if type(stored.spec) is not type(spec) or differing:
        raise AdapterError(
            f"it is another adapter than the job's peft says ({'; '.join(differing) or stored.spec.type})",
            where=str(folder),
            hint="set the job's peft to the folder's",
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


def _settings(spec: PeftBase, stored: PeftBase) -> list[tuple[str, object, object]]:
    """What the two say of each setting that decides what the parameters mean: dropout and targets do not."""
    ours, theirs = spec.model_dump(), stored.model_dump()
    keys = [key for key in ours if key in theirs and "dropout" not in key and "target_modules" not in key]
    return [(key, ours[key], theirs[key]) for key in keys]
