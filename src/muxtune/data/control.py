"""Tells the control tokens that a template wrote from those that merely stand in someone's text.

After rendering, both look the same. So before it, every string that comes from the data gets an invisible mark inside
each name of a control token (`<` mark `|im_end|>`), and at an end that could join with the template's text into one.
Rendered, the marks are taken out again and only their places kept: a name that has such a place inside it is text
(`literal.py` encodes it so), all others are the template's.

Strings without such names, nearly all, are handed over untouched, so nothing changes for them. A mark is a character
that the conversation does not hold, and no whitespace, so a template may trim and split as it likes; that a marked
rendering equals the unmarked one is checked by the caller. The idea of marking is transformers' (its
`sanitize_control_tokens`); marking inside the name, in keys, and at the ends is ours.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

Span = tuple[int, int]
_FIRST_MARK = 0xF0000  # private-use plane 15; `literal.py` has plane 16


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendering without its marks; `points` are the places (before character p) where they stood, in order."""

    text: str
    points: tuple[int, ...] = ()

    def crosses(self, start: int, end: int) -> bool:
        """Whether a mark stood strictly inside [start, end)."""
        k = bisect_right(self.points, start)
        return k < len(self.points) and self.points[k] < end

    def place(self, index: int) -> int:
        """Where a character of the marked rendering is in the text."""
        low, high = 0, len(self.points)
        while low < high:  # mark number k stood at points[k] + k
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.points[middle] + middle < index else (low, middle)
        return index - low


class TokenNames:
    """Finds the names of some tokens in a text as the `tokenizers` library does: leftmost, then longest."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name for name in names if name.strip())
        pattern = _any_of(sorted(self.names)) if self.names else "(?!)"
        self._pattern = re.compile(pattern)
        self._everywhere = re.compile(f"(?=(?:{pattern}))")  # overlapping ones too
        self._beginnings = tuple({name[:k] for name in self.names for k in range(1, len(name))})
        self._endings = tuple({name[k:] for name in self.names for k in range(1, len(name))})

    def find(self, text: str) -> Iterator[Span]:
        for match in self._pattern.finditer(text):
            yield match.span()

    def meant(self, marked: MarkedText) -> tuple[list[Span], bool]:
        """The names that the template wrote, and whether there are others."""
        meant: list[Span] = []
        forged = False
        place = 0
        while match := self._pattern.search(marked.text, place):
            if marked.crosses(*match.span()):
                forged = True
                place = match.start() + 1
            else:
                meant.append(match.span())
                place = match.end()
        return meant, forged

    def in_text(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def needs_marks(self, text: str) -> bool:
        """Whether a string holds a name, or could make one with what a template writes beside it."""
        return self.in_text(text) or text.rstrip().endswith(self._beginnings) or text.lstrip().startswith(self._endings)

    def mark(self, text: str, mark: str) -> str:
        """The text with a mark inside each name, and at an end that could become part of one."""
        if not self.needs_marks(text):
            return text
        places = {match.start() + 1 for match in self._everywhere.finditer(text)}
        if text.rstrip().endswith(self._beginnings):
            places.add(len(text.rstrip()))
        if text.lstrip().startswith(self._endings):
            places.add(len(text) - len(text.lstrip()))
        edges = [0, *sorted(places), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(edges))

    def mark_all(self, value: object, mark: str) -> object:
        """Marks the strings of a JSON value, keys included."""
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, Mapping):
            return {self.mark(str(key), mark): self.mark_all(item, mark) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark_all(item, mark) for item in value]
        return value


def common_length(one: str, other: str) -> int:
    """Length of the longest common beginning, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _any_of(names: list[str]) -> str:
    """A regular expression of sorted names as a tree of common beginnings; each match is the longest there is.

    A plain alternation of a thousand names, which some tokenizers have, is ten times slower.
    """
    length = common_length(names[0], names[-1])
    shared, rests = names[0][:length], [name[length:] for name in names]
    branches = [_any_of(list(group)) for first, group in groupby(rests, key=lambda rest: rest[:1]) if first]
    if not branches:
        return re.escape(shared)
    return re.escape(shared) + "(?:" + "|".join(branches) + ")" + ("" if rests[0] else "?")


def strings_of(value: object) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_of(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_of(item)


def choose_mark(strings: Sequence[str]) -> str:
    """A private-use character that none of the strings holds."""
    used = set().union(*map(set, strings)) if strings else set()
    return next(char for char in map(chr, range(_FIRST_MARK, _FIRST_MARK + len(used) + 1)) if char not in used)


def take_out(text: str, mark: str | None) -> MarkedText:
    """A rendering's text and where its marks stood."""
    if mark is None or mark not in text:
        return MarkedText(text)
    points: list[int] = []
    length = 0
    pieces = text.split(mark)
    for piece in pieces[:-1]:
        length += len(piece)
        points.append(length)
    return MarkedText("".join(pieces), tuple(points))
