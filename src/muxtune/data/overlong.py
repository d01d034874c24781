"""What becomes of an example longer than `max_length`, and of one without a target.

    truncate   its first `max_length` tokens stay
    drop       it goes
    fail       the file is refused, with the line
    split      it becomes pieces of at most `max_length` tokens, each beginning with the last token of the one before:
               that token is context there, so every target of the whole is a target of exactly one piece

A preference pair is one example: it is `overlong` where either half is, each half is truncated for itself, and it goes
as a whole where a half has no target left. It cannot be split.

Pieces without a target are left out, and so is an example that has none left. The default is `split` for text and
`truncate` for all other shapes: a piece of a conversation that has lost its question teaches to answer nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from muxtune.data.problems import ProblemList
from muxtune.data.tokens import Ids, Mask, TokenTable
from muxtune.data.types import Shape
from muxtune.errors import DataError

Overlong = Literal["truncate", "drop", "fail", "split"]
Piece = tuple[Ids, Mask]
Pieces = Sequence[Piece]  # of one example; at least one (two, of a pair), each with a target
Fate = Literal["kept", "truncated", "split", "refused", "dropped_overlong", "dropped_untrained"]


@dataclass(slots=True)
class Kept:
    """The examples of one file that are left, and the lines of those that something happened to."""

    path: str
    examples: list[Pieces] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    dropped_overlong: list[int] = field(default_factory=list)
    dropped_untrained: list[int] = field(default_factory=list)
    same_responses: list[int] = field(default_factory=list)  # pairs whose halves, as kept, are one


def default_overlong(shape: Shape) -> Overlong:
    return "split" if shape == "text" else "truncate"


def keep(table: TokenTable, path: str, max_length: int, policy: Overlong, *, group: int = 1) -> Kept:
    """Applies the policy to every example (`group` rows) of a file. Raises DataError where it refuses one, or none is
    left."""
    if group > 1 and policy == "split":
        raise DataError("a preference pair cannot be split", where=path, hint="overlong: truncate, drop or fail")
    kept, problems = Kept(path), ProblemList()
    for first in range(0, len(table), group):
        line = int(table.lines[first])
        rows = [table.row(number) for number in range(first, first + group)]
        fate, pieces = judge(rows, max_length, policy)
        if fate == "refused":
            longest = max(len(ids) for ids, _ in rows)
            problems.add(line, "overlong", f"{longest} tokens, more than max_length {max_length}")
        elif fate != "kept":
            happened: list[int] = getattr(kept, fate)
            happened.append(line)
        if pieces:
            kept.examples.append(pieces)
            if group > 1 and _same(pieces):
                kept.same_responses.append(line)
    problems.raise_if_any(path)
    if not kept.examples:
        raise _nothing_left(kept, max_length)
    return kept


def judge(rows: Sequence[Piece], max_length: int, policy: Overlong) -> tuple[Fate, Pieces]:
    """What becomes of one example (a pair is two rows), and the pieces that are left of it."""
    overlong = max(len(ids) for ids, _ in rows) > max_length
    if overlong and policy == "fail":
        return "refused", []
    if overlong and policy == "drop":
        return "dropped_overlong", []
    pieces = _whole_group([cut(ids, mask, max_length, policy) for ids, mask in rows])
    if not pieces:
        return "dropped_untrained", []
    return ("kept" if not overlong else "split" if policy == "split" else "truncated"), pieces


def _same(pieces: Pieces) -> bool:
    """Whether the two halves of a pair are the same tokens, trained alike."""
    (chosen, chosen_mask), (rejected, rejected_mask) = pieces
    return np.array_equal(chosen, rejected) and np.array_equal(chosen_mask, rejected_mask)


def _whole_group(halves: Sequence[Pieces]) -> Pieces:
    """The pieces of all, or none where one has none."""
    return [piece for pieces in halves for piece in pieces] if all(halves) else []


def cut(ids: Ids, mask: Mask, max_length: int, policy: Overlong) -> Pieces:
    """The pieces that have a target, each of at most `max_length` tokens."""
    if policy == "split" and len(ids) > max_length:
        pieces = _split(ids, mask, max_length)
    else:
        pieces = [(ids[:max_length], mask[:max_length])]
    return [piece for piece in pieces if piece[1].any()]


def _split(ids: Ids, mask: Mask, max_length: int) -> list[Piece]:
    assert max_length >= 2, "a piece needs a token of context and one to predict"
    pieces = []
    for start in range(0, len(ids) - 1, max_length - 1):
        piece_mask = mask[start : start + max_length].copy()
        piece_mask[0] = False
        piece_mask.flags.writeable = False
        pieces.append((ids[start : start + max_length], piece_mask))
    return pieces


def _nothing_left(kept: Kept, max_length: int) -> DataError:
    reasons = []
    if kept.dropped_untrained:
        reasons.append(f"{len(kept.dropped_untrained)} have nothing to train on within {max_length} tokens")
    if kept.dropped_overlong:
        reasons.append(f"{len(kept.dropped_overlong)} are longer than {max_length} tokens")
    hint = "check train_on, weight and max_length; `muxtune data preview` shows which tokens are trained"
    return DataError(f"no example is left to train on: {', '.join(reasons)}", where=kept.path, hint=hint)
