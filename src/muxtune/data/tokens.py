"""The tokens of a whole file in four flat arrays: what the cache stores, and what sequences are views of.

Row i of n owns ids[starts[i]:starts[i+1]] and the same part of the mask; `lines[i]` is its line in the file. An example
is a row, a preference pair two in a row: the chosen one, then the rejected one.
Nothing is cut here: `max_length` and `overlong` are applied later, so that one table serves every member of a sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muxtune.data.types import Shape, group_size

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """T tokens of n rows: ids int32 [T], mask bool [T], starts int64 [n + 1], lines int64 [n]; all read-only."""

    ids: Ids
    mask: Mask
    starts: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for array in (self.ids, self.mask, self.starts, self.lines):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, i: int) -> tuple[Ids, Mask]:
        part = slice(int(self.starts[i]), int(self.starts[i + 1]))
        return self.ids[part], self.mask[part]

    def equals(self, other: TokenTable) -> bool:
        return all(
            ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
            for ours, theirs in zip(self._arrays(), other._arrays(), strict=True)
        )

    def _arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        return (self.ids, self.mask, self.starts, self.lines)


class TableBuilder:
    """Collects rendered examples, then lays them flat once."""

    def __init__(self) -> None:
        self._ids: list[Ids] = []
        self._masks: list[Mask] = []
        self._lines: list[int] = []

    def add(self, ids: Ids, mask: Mask, line: int) -> None:
        """The next example: T ids with their mask, read from `line`."""
        assert ids.dtype == np.int32 and mask.dtype == np.bool_ and ids.shape == mask.shape, (ids.dtype, mask.dtype)
        assert not mask[:1].any(), "nothing predicts the first token, so it is never a target"
        self._ids.append(ids)
        self._masks.append(mask)
        self._lines.append(line)

    def build(self) -> TokenTable:
        """All that was added, in order."""
        lengths = np.array([len(ids) for ids in self._ids], dtype=np.int64)
        return TokenTable(
            ids=np.concatenate([np.zeros(0, np.int32), *self._ids]),
            mask=np.concatenate([np.zeros(0, np.bool_), *self._masks]),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
            lines=np.array(self._lines, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedFile:
    """A file's examples as tokens. `system` is the system message that all of its examples share, if they do; `chat`
    whether any of them is a conversation."""

    table: TokenTable
    shape: Shape
    sha256: str
    system: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        assert len(self.table) % self.group == 0, "half a pair"

    @property
    def group(self) -> int:
        """Rows of an example."""
        return group_size(self.shape)

    @property
    def examples(self) -> int:
        return len(self.table) // self.group

    @property
    def prompt_shape(self) -> Shape:
        """The shape of data whose prompts are written as these are: a pair's are a conversation's, or bare."""
        if self.shape != "preference":
            return self.shape
        return "messages" if self.chat else "prompt_completion"
