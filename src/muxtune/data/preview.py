"""`muxtune data preview`: what the model will see, with what it is trained on marked.

Decoded from the tokens and the mask themselves, not from the template's text, so that it shows what training has.
An example that training drops, cuts or refuses says so in its heading, by the same judgement that training uses.
On a terminal trained text is coloured; elsewhere it stands between WHITE SQUARE BRACKETs. Control characters of the
data are written as escapes: a data file must not drive the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from muxtune.data.overlong import Fate, Overlong, default_overlong, judge
from muxtune.data.render import Rejected, Rendered, Renderer
from muxtune.data.tokenize import trained_mask
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.tokens import Ids, Mask
from muxtune.data.types import Example

OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
_NOTES: Mapping[Fate, str] = {
    "kept": "",
    "truncated": "longer than {} tokens, truncated in training",
    "split": "longer than {} tokens, split in training",
    "refused": "longer than {} tokens, refused in training",
    "dropped_overlong": "longer than {} tokens, dropped in training",
    "dropped_untrained": "nothing to train on, dropped in training",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens that are all trained, or all not, as text."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """One example: its pieces and counts, or the `problem` it was refused for. `note` says what training makes of it,
    where that is not all of what is shown."""

    where: str
    tokens: int = 0
    trained_tokens: int = 0
    pieces: tuple[Piece, ...] = ()
    problem: Rejected | None = None
    note: str | None = None

    def heading(self) -> str:
        if self.problem is not None:
            return f"{self.where}: refused: {self.problem.message} [{self.problem.code}]"
        note = f"; {self.note}" if self.note else ""
        return f"{self.where}: {self.tokens} tokens, {self.trained_tokens} trained{note}"


def preview(
    renderer: Renderer,
    examples: Sequence[Example],
    *,
    max_length: int | None = None,
    overlong: Overlong | None = None,
) -> list[Preview]:
    """What becomes of each example; a pair is two. Raises DataError as `Renderer.render` does.

    `max_length` None: however long they are; `overlong` None: as their shape has it.
    """
    results = iter(renderer.render([part for example in examples for part in example.group]))
    shown: list[Preview] = []
    for example in examples:
        shown += _of(example, [next(results) for _ in example.group], renderer, max_length, overlong)
    return shown


def show(previews: Sequence[Preview], console: Console) -> None:
    """Print them, coloured where the console has colours."""
    coloured = console.is_terminal and not console.no_color
    for item in previews:
        console.print(Text(item.heading(), style="bold" if coloured else ""), soft_wrap=True)
        if item.problem is None:
            console.print(_coloured(item) if coloured else Text(plain(item)), soft_wrap=True)
        console.print()


def plain(item: Preview) -> str:
    """The text with brackets around what is trained."""
    return "".join(f"{OPEN}{_visible(p.text)}{CLOSE}" if p.trained else _visible(p.text) for p in item.pieces)


def _of(
    example: Example,
    results: Sequence[Rendered | Rejected],
    renderer: Renderer,
    max_length: int | None,
    overlong: Overlong | None,
) -> list[Preview]:
    rows = [
        (result.ids, trained_mask(example, result, renderer.train_on))
        for result in results
        if not isinstance(result, Rejected)
    ]
    note = "dropped with its other half" if rows else None
    if len(rows) == len(results):
        limit = max_length or max(len(ids) for ids, _ in rows)
        fate, _ = judge(rows, limit, overlong or default_overlong(example.shape))
        note = _NOTES[fate].format(limit)
    remaining = iter(rows)
    halves = (" chosen", " rejected") if example.rejected else ("",)
    return [
        Preview(f"{example.path}:{example.line}{half}", problem=result)
        if isinstance(result, Rejected)
        else _one(f"{example.path}:{example.line}{half}", *next(remaining), renderer.tokenizer, note or None)
        for half, result in zip(halves, results, strict=True)
    ]


def _one(where: str, ids: Ids, mask: Mask, tokenizer: TextTokenizer, note: str | None) -> Preview:
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    pieces: list[Piece] = []
    before = ""
    for start, end in pairwise(borders):
        # Decoding from the start each time keeps the spaces that decoders strip from the front of a text.
        text = tokenizer.decode(ids[:end].tolist())
        pieces.append(Piece(text[len(before) :], bool(mask[start])))
        before = text
    return Preview(where, len(ids), int(mask.sum()), tuple(pieces), note=note)


def _coloured(item: Preview) -> Text:
    text = Text()
    for piece in item.pieces:
        text.append(_visible(piece.text), style="black on green" if piece.trained else "dim")
    return text


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
