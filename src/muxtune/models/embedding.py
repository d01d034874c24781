"""The backbone's token embedding: rows are looked up by id, or given by the pass (learned input rows).

`install` routes the embedding module's forward through this object, as `muxtune.models.attach` does with operators. It
is a BaseOp whose rows are token ids: a hook of the pass gets it and the ids, and answers their embeddings. A given row
stands where a looked-up one would: whatever the model adds to it or makes of it afterwards - positions, an input
projection - it does to both; a scale of the looked-up ones (Gemma's) is the embedding's own and stays with them.

Cost: nothing without hooks and given rows; a copy of the rows where some are given.

Legend: T packed tokens, V given rows (of `table_VE`: entries), E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from muxtune.models.attach import GivenRows, Hook, PassSlot
from muxtune.spec.peft import Place


class TokenEmbedding:
    """Stands in for the module's forward. `served` is what was given to the pass in progress, and `asked` the hook that
    ran, once they have been used."""

    kind: Literal["embedding"] = "embedding"
    roles = frozenset({"embed"})
    layer = None
    biased = False

    def __init__(self, name: str, module: nn.Module, slot: PassSlot) -> None:
        self.name = name
        self._slot = slot
        self._module = module
        self._own_forward = type(module).forward
        assert isinstance(module.weight, Tensor)
        self.table_VE = module.weight.detach()
        self.entries, self.width = module.weight.shape
        self.in_features, self.out_features = self.entries, self.width
        self.served: Sequence[GivenRows] = ()
        self.asked: Hook | None = None
        module.__dict__["forward"] = self

    @property
    def place(self) -> Place:
        return Place(self.name, self.kind, self.roles, self.layer, self.entries, self.width)

    @property
    def table(self) -> Tensor:
        """The weight, one row an entry."""
        return self.table_VE

    @property
    def scale(self) -> float:
        """What the module multiplies looked-up rows with, to the last bit of how it keeps it."""
        scale = getattr(self._module, "embed_scale", 1.0)
        if isinstance(scale, Tensor) and scale.is_meta:  # a model without memory: from what the buffer is made of
            scale = torch.tensor(float(self._module.scalar_embed_scale))  # type: ignore[arg-type]
        return float(scale)

    @property
    def padding_id(self) -> int | None:
        """The entry that nothing is ever learned for: PyTorch leaves the gradient of `padding_idx` at zero."""
        padding_id: int | None = getattr(self._module, "padding_idx", None)
        return padding_id

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T, E], looked up and scaled."""
        x_1TE: Tensor = self._own_forward(self._module, ids_T[None])
        return x_1TE[0]

    def __call__(self, ids_1T: Tensor) -> Tensor:
        """[1, T, E]: what the module's forward becomes."""
        current = self._slot.current
        self.asked = current.hooks.get(self.name) if current is not None else None
        x_TE = self.forward(ids_1T[0]) if self.asked is None else self.asked(self, ids_1T[0])
        if current is None or not current.given:
            return x_TE[None]
        self.served = current.given
        return _with_given(x_TE, current.given)[None]


def _with_given(x_TE: Tensor, given: Sequence[GivenRows]) -> Tensor:
    pieces: list[Tensor] = []
    done = 0
    for item in given:
        assert done <= item.start, "given rows overlap, or are out of order"
        pieces += [x_TE[done : item.start], item.rows_VE.to(x_TE.dtype)]
        done = item.start + item.rows_VE.shape[0]
    return torch.cat([*pieces, x_TE[done:]])
