"""Renderers of the families in `folders.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muxtune.data.render import Renderer
from muxtune.data.tokenizer import TextTokenizer
from tests.data.folders import FAMILIES, make_folder
from tests.data.rendering import NOW, Open


@pytest.fixture
def open_renderer(tmp_path: Path) -> Iterator[Open]:
    """`open_renderer(family, source=None, **options)`: a renderer of a family's tokenizer, closed afterwards."""
    opened: list[Renderer] = []

    def make(family: str = "chatml", source: str | None = None, **options: Any) -> Renderer:
        folder = make_folder(tmp_path / f"{family}-{len(opened)}", FAMILIES[family], template=source)
        opened.append(Renderer(TextTokenizer.from_folder(folder), now=NOW, **options))
        return opened[-1]

    yield make
    for renderer in opened:
        renderer.close()


@pytest.fixture(scope="package")
def family_renderers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Renderer]]:
    root = tmp_path_factory.mktemp("shared")
    made = {
        name: Renderer(TextTokenizer.from_folder(make_folder(root / name, family)), now=NOW)
        for name, family in FAMILIES.items()
    }
    yield made
    for renderer in made.values():
        renderer.close()
