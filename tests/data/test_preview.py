"""The preview shows exactly what is trained, and lets no data drive the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from muxtune.data.overlong import Overlong
from muxtune.data.preview import Piece, plain, preview, show
from muxtune.data.render import Renderer
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example, Message
from tests.data.folders import FAMILIES, make_folder

NOW = datetime(2026, 3, 9)


@pytest.fixture(params=["mistral", "llama-2"])
def renderer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Renderer]:
    folder = make_folder(tmp_path, FAMILIES[request.param])
    with Renderer(TextTokenizer.from_folder(folder), now=NOW) as made:
        yield made


def chat(*contents: str, role: str = "user") -> Example:
    turns = [Message((role, "assistant")[k % 2], text) for k, text in enumerate(contents)]
    return Example("data.jsonl", 3, "messages", messages=tuple(turns))


def printed(renderer: Renderer, example: Example, *, terminal: bool, no_color: bool = False) -> str:
    out = io.StringIO()
    colours = {"force_terminal": True, "color_system": "standard"} if terminal else {}
    show(preview(renderer, [example]), Console(file=out, width=60, no_color=no_color, **colours))  # type: ignore[arg-type]
    return out.getvalue()


def test_brackets_stand_around_what_is_trained(renderer: Renderer) -> None:
    (item,) = preview(renderer, [chat("Question?", "Answer.", "More?", "No.")])
    text = plain(item).replace(" ", "")
    assert "[INST]Question?[/INST]⟦Answer.</s>⟧" in text and text.endswith("[INST]More?[/INST]⟦No.</s>⟧")
    (result,) = renderer.render([chat("Question?", "Answer.", "More?", "No.")])
    assert item.tokens == len(result.ids) and item.trained_tokens == int(result.mask.sum())  # type: ignore[union-attr]
    assert item.heading() == f"data.jsonl:3: {item.tokens} tokens, {item.trained_tokens} trained"


def test_the_pieces_join_to_the_whole_text(renderer: Renderer) -> None:
    example = chat(" two  spaces é", "\N{PILE OF POO} x", "y", "z")
    (item,) = preview(renderer, [example])
    (result,) = renderer.render([example])
    assert "".join(piece.text for piece in item.pieces) == renderer.tokenizer.decode(result.ids.tolist())  # type: ignore[union-attr]
    assert [piece.trained for piece in item.pieces] == [False, True, False, True]


def test_rows_of_prompt_and_completion(renderer: Renderer) -> None:
    (item,) = preview(renderer, [Example("d", 1, "prompt_completion", prompt="2+2=", completion="4")])
    assert [piece.trained for piece in item.pieces] == [False, True]
    assert item.pieces[1].text.strip() == "4</s>"


def test_a_refused_example_says_why(renderer: Renderer) -> None:
    out = printed(renderer, chat("S", "B", role="tool"), terminal=False)
    assert out.startswith("data.jsonl:3: refused: template of ") and "[template_error]" in out


def test_a_terminal_gets_colours_and_a_file_gets_brackets(renderer: Renderer) -> None:
    example = chat("Question?", "Answer.")
    coloured = printed(renderer, example, terminal=True)
    assert "\x1b[" in coloured and "⟦" not in coloured
    for out in (
        printed(renderer, example, terminal=False),
        printed(renderer, example, terminal=True, no_color=True),
    ):
        assert "⟦" in out and "\x1b[3" not in out and "\x1b[4" not in out


def test_markup_and_control_characters_of_the_data_are_shown_as_they_are(renderer: Renderer) -> None:
    example = chat("[bold]x[/bold] \x1b[2J\x07", "a\tb\nc")
    for terminal in (False, True):
        out = printed(renderer, example, terminal=terminal)
        assert "[bold]x[/bold]" in out
        assert "\x1b[2J" not in out and "\x07" not in out and "\\x1b[2J\\x07" in out


def test_a_long_line_is_not_broken(renderer: Renderer) -> None:
    out = printed(renderer, chat("word " * 40, "B"), terminal=False)
    assert "word " * 40 in out


def test_nothing_trained_is_one_piece(renderer: Renderer) -> None:
    (item,) = preview(renderer, [Example("d", 1, "messages", messages=(Message("user", "A"),))])
    assert item.trained_tokens == 0 and len(item.pieces) == 1 and isinstance(item.pieces[0], Piece)


EMPTY = Example("d", 1, "prompt_completion", prompt="2+2=", completion="")
PAIR = Example(
    "d", 2, "preference", prompt="a", completion="b", rejected=Example("d", 2, "preference", prompt="a", completion="")
)


def test_what_training_drops_is_marked(renderer: Renderer) -> None:
    dropped = "0 trained; nothing to train on, dropped in training"
    (item,) = preview(renderer, [EMPTY])
    assert item.heading().endswith(dropped) and not any(piece.trained for piece in item.pieces)
    assert [item.heading().endswith(dropped) for item in preview(renderer, [PAIR])] == [True, True]
    with Renderer(renderer.tokenizer, now=NOW, train_on="all") as whole:
        (item,) = preview(whole, [EMPTY])
        assert item.note is None and item.trained_tokens > 0


@pytest.mark.parametrize(
    ("policy", "note"),
    [
        (None, "longer than 9 tokens, truncated in training"),
        ("split", "longer than 9 tokens, split in training"),
        ("drop", "longer than 9 tokens, dropped in training"),
        ("fail", "longer than 9 tokens, refused in training"),
    ],
)
def test_what_is_too_long_is_marked(renderer: Renderer, policy: Overlong | None, note: str) -> None:
    long = Example("d", 1, "prompt_completion", prompt="a", completion="b " * 40)
    (item,) = preview(renderer, [long], max_length=9, overlong=policy)
    assert item.note == note and item.heading().endswith(f"; {note}")
    (item,) = preview(renderer, [long], max_length=500, overlong=policy)
    assert item.note is None and item.heading().endswith("trained")
