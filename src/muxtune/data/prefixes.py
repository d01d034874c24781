"""Which sequences of a batch begin alike: their order by tokens, and how many each has in common with the one before.

Sorted, sequences that begin alike are neighbours, and what any two have in common is the least that neighbours between
them have. Groups (the two of a pair) stay together, in the order of their first sequences.

Cost: n log n comparisons of bytes, and one comparison of tokens a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from muxtune.data.types import TokenSequence


def in_common(one: TokenSequence, other: TokenSequence) -> int:
    """How many first tokens of both are the same, of those that are inputs."""
    shorter = min(one.input_tokens, other.input_tokens)
    differs = one.ids[:shorter] != other.ids[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def by_beginning(sequences: Sequence[TokenSequence], group: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(places in order, `group` neighbours together; tokens that each has in common with the one before it)."""
    firsts = sorted(range(0, len(sequences), group), key=lambda place: _key(sequences[place]))
    order = tuple(place for first in firsts for place in range(first, first + group))
    common = [in_common(sequences[one], sequences[other]) for one, other in zip(order[1:], order, strict=False)]
    return order, (0, *common)[: len(order)]


def _key(sequence: TokenSequence) -> bytes:
    """Sorts as the tokens do."""
    return sequence.ids[: sequence.input_tokens].astype(">u4").tobytes()
