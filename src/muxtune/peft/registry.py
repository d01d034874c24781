"""Which PEFT spec is made by which PEFT type: the one table that a new type is entered in.

A type is one module of this package with an object that satisfies `PeftType`, and a spec in `muxtune.spec`. Everything
outside this package goes through `build_adapter`, `payload` and `start_from`, and never asks which type it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PeftPayload
from muxtune.peft.lora_type import LORA
from muxtune.spec.peft import Lora, PeftBase


class PeftType(Protocol):
    """What a PEFT type must be able to do with its spec. `spec` is always of the class it is registered under."""

    def build(self, spec: Any, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device) -> Adapter:
        """A fresh adapter that leaves the backbone's function as it is; its start depends on `seed` and names alone.

        `dtype` is that of the parameters. Raises AdapterError where a target matches nothing, or where the family has
        no place for the type.
        """
        ...

    def payload(self, spec: Any, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """The adapter as `adapter_config.json` and tensors: peft's format where peft has the type."""
        ...

    def load(self, spec: Any, adapter: Adapter, folder: Path, view: BackboneView, *, base_sha256: str | None) -> None:
        """Give a fresh adapter the values of a folder, which is untrusted input.

        Raises AdapterError for a folder that is not sound, or that is not the adapter `spec` describes.
        """
        ...


TYPES: Mapping[type, PeftType] = {Lora: LORA}


def build_adapter(
    spec: PeftBase, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """A fresh adapter of any type. `dtype` is the backbone's; parameters are never below float32."""
    precise = torch.promote_types(dtype, torch.float32)
    return TYPES[type(spec)].build(spec, view, seed=seed, dtype=precise, device=device)


def payload(spec: PeftBase, adapter: Adapter, view: BackboneView) -> PeftPayload:
    """See `PeftType.payload`."""
    return TYPES[type(spec)].payload(spec, adapter, view)


def start_from(spec: PeftBase, adapter: Adapter, folder: Path, view: BackboneView, *, base_sha256: str | None) -> None:
    """See `PeftType.load`."""
    TYPES[type(spec)].load(spec, adapter, folder, view, base_sha256=base_sha256)
    adapter.refresh()
