"""The backbone's token embedding: rows are looked up by id, or given by the pass (learned input rows).

`install` routes the embedding module's forward through this object, as `muxtune.models.attach` does with operators.
A given row stands where a looked-up one would: whatever the model adds to it or makes of it afterwards - positions, an
input projection - it does to both; a scale of the looked-up ones (Gemma's) is the embedding's own and stays with them.

Cost: nothing without given rows; else one copy of the rows.

Legend: T packed tokens, V given rows, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muxtune.models.attach import GivenRows, PassSlot
from muxtune.spec.peft import Place


class TokenEmbedding:
    """Stands in for the module's forward. `served` is what was given to the pass in progress, once it has been used."""

    def __init__(self, name: str, module: nn.Module, slot: PassSlot) -> None:
        self.name = name
        self._slot = slot
        self._module = module
        self._own_forward = type(module).forward
        assert isinstance(module.weight, Tensor)
        self.entries, self.width = module.weight.shape
        self.served: Sequence[GivenRows] = ()
        module.__dict__["forward"] = self

    @property
    def place(self) -> Place:
        return Place(self.name, "embedding", frozenset({"embed"}), None, self.entries, self.width)

    def __call__(self, ids_1T: Tensor) -> Tensor:
        """[1, T, E]."""
        x_1TE: Tensor = self._own_forward(self._module, ids_1T)
        current = self._slot.current
        if current is None or not current.given:
            return x_1TE
        self.served = current.given
        return _with_given(x_1TE[0], current.given)[None]


def _with_given(x_TE: Tensor, given: Sequence[GivenRows]) -> Tensor:
    pieces: list[Tensor] = []
    done = 0
    for item in given:
        assert done <= item.start, "given rows overlap, or are out of order"
        pieces += [x_TE[done : item.start], item.rows_VE.to(x_TE.dtype)]
        done = item.start + item.rows_VE.shape[0]
    return torch.cat([*pieces, x_TE[done:]])
