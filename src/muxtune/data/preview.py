"""`muxtune data preview`: what the model will see, with what it is trained on marked.

Decoded from the tokens and the mask themselves, not from the template's text, so that it shows what training has.
On a terminal trained text is coloured; elsewhere it stands between WHITE SQUARE BRACKETs. Control characters of the
data are written as escapes: a data file must not drive the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from muxtune.data.render import Rejected, Rendered, Renderer
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example

OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens that are all trained, or all not, as text."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """One example: its pieces and counts, or the `problem` it was refused for."""

    where: str
    tokens: int = 0
    trained_tokens: int = 0
    pieces: tuple[Piece, ...] = ()
    problem: Rejected | None = None

    def heading(self) -> str:
        if self.problem is not None:
            return f"{self.where}: refused: {self.problem.message} [{self.problem.code}]"
        return f"{self.where}: {self.tokens} tokens, {self.trained_tokens} trained"


def preview(renderer: Renderer, examples: Sequence[Example]) -> list[Preview]:
    """What becomes of each example; a pair is two. Raises DataError as `Renderer.render` does."""
    parts = [
        (part, f" {half}" if half else "")
        for example in examples
        for part, half in zip(example.group, ("chosen", "rejected") if example.rejected else ("",), strict=True)
    ]
    results = renderer.render([part for part, _ in parts])
    return [
        _one(f"{part.path}:{part.line}{half}", result, renderer.tokenizer)
        for (part, half), result in zip(parts, results, strict=True)
    ]


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


def _one(where: str, result: Rendered | Rejected, tokenizer: TextTokenizer) -> Preview:
    if isinstance(result, Rejected):
        return Preview(where, problem=result)
    borders = [0, *(np.flatnonzero(np.diff(result.mask)) + 1).tolist(), len(result.ids)]
    pieces: list[Piece] = []
    before = ""
    for start, end in pairwise(borders):
        # Decoding from the start each time keeps the spaces that decoders strip from the front of a text.
        text = tokenizer.decode(result.ids[:end].tolist())
        pieces.append(Piece(text[len(before) :], bool(result.mask[start])))
        before = text
    return Preview(where, len(result.ids), int(result.mask.sum()), tuple(pieces))


def _coloured(item: Preview) -> Text:
    text = Text()
    for piece in item.pieces:
        text.append(_visible(piece.text), style="black on green" if piece.trained else "dim")
    return text


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
