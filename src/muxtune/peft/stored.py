"""An adapter as it was read from a folder, of whatever type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from muxtune.data.manifest import TrainingManifest
from muxtune.spec.peft import PeftBase


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """`values` are by the names of the adapter's state. `manifest` is None where another tool wrote it."""

    spec: PeftBase
    values: Mapping[str, Tensor]
    base_name: str | None
    manifest: TrainingManifest | None
