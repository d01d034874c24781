"""An adapter as it was read from a folder, of whatever type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from muxtune.data.manifest import TrainingManifest
from muxtune.spec.peft import PeftBase

# Full name of a parameter of the base model -> its new value, made from the old one. Both in fp32 at least; a linear's
# weight is [O, I] here, whichever way round the base keeps it.
Changes: TypeAlias = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """`values` are by the names of the adapter's state. `manifest` is None where another tool wrote it."""

    spec: PeftBase
    values: Mapping[str, Tensor]
    base_name: str | None
    manifest: TrainingManifest | None
