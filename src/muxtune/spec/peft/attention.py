"""How wide the parts of attention are, layer by layer, from attach points alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from muxtune.spec.peft.base import Place

_PARTS = frozenset({"q", "k", "v"})


def widths(places: Iterable[Place], part: Literal["q", "k", "v"]) -> dict[int, int]:
    """Layer -> features of its queries, keys or values, all heads together; a fused linear makes equal shares.

    Empty where the family's parts are not known by name.
    """
    return {
        place.layer: place.outputs // len(place.roles & _PARTS)
        for place in places
        if place.kind == "linear" and part in place.roles and place.layer is not None
    }


def flops_of_positions(positions: int, places: Iterable[Place]) -> int:
    """Of one query's attention to so many more positions, forward and backward, in all layers.

    Scores and values are two products; each has two more on the way back, a multiply-add being 2.
    """
    return 3 * 2 * 2 * positions * sum(widths(places, "q").values())
