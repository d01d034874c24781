"""Rows of a pass, sequence by sequence: what leads each, how its own tokens are numbered, and padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muxtune.engine.layout import Layout
from muxtune.peft.base import Adapter
from muxtune.peft.parameters import FlatParameters

CPU = torch.device("cpu")


class _Prefix:
    length = 3

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("laying out rows reads no values")


def _adapter(*, prefix: bool, virtual: int) -> Adapter:
    adapter = Adapter({}, FlatParameters({"rows": (max(1, virtual), 4)}, torch.float32, CPU))
    if prefix:
        adapter.prefix = _Prefix()
    if virtual:
        adapter.virtual_VE = adapter.parameters.views["rows"]
    return adapter


@pytest.mark.parametrize("virtual", [0, 2, 16])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_sequence_goes_on_from_what_leads_it(prefix: bool, virtual: int) -> None:
    adapter, layout = _adapter(prefix=prefix, virtual=virtual), Layout()
    before = 3 * prefix
    assert layout.add([5, 6], None) == 0
    assert layout.add([7, 8, 9], adapter, cache_slot=4) == 2 + virtual
    assert layout.add([1], adapter, cached=6, cache_slot=2) == 5 + virtual
    used = layout.rows
    rows = layout.finish(CPU)
    assert used == 6 + virtual and len(rows.ids_T) == used + -used % 16
    assert rows.ids_T[:used].tolist() == [5, 6, *[0] * virtual, 7, 8, 9, 1]
    first = list(range(before, before + virtual + 3))
    assert rows.positions_T[:used].tolist() == [0, 1, *first, before + virtual + 6]
    assert rows.positions_T[used:].tolist() == list(range(-used % 16))
    own = [(segment.rows, segment.cache_slot, len(segment.spans)) for segment in rows.segments]
    assert own[:3] == [(2, None, 0), (virtual + 3, 4, int(prefix)), (1, 2, 0)]
    assert own[3:] == ([(-used % 16, None, 0)] if used % 16 else [])
    assert [(item.start, len(item.rows_VE)) for item in rows.given] == ([(2, virtual)] if virtual else [])


def test_full_rows_are_not_padded() -> None:
    layout = Layout()
    layout.add(range(16), None)
    rows = layout.finish(CPU)
    assert len(rows.segments) == 1 and len(rows.ids_T) == 16
