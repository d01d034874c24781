"""A data file -> its tokens and masks, from the cache where the same work was done before.

    path -> digest -> cached? -> else read, render and collect every refusal, then store

Boundary: what is a target is the renderer's decision, but for one rule: an answer that says nothing (an empty
completion) teaches nothing, so an example of only such answers has no target - and a pair has none where one of its
halves has none. A pair is two rows of the table, one after the other, or none where either is refused. What is too long
is dealt with later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from muxtune.data.cache import TokenCache, cache_key
from muxtune.data.lines import file_sha256
from muxtune.data.reader import ExampleReader, Record
from muxtune.data.render import Rejected, Rendered
from muxtune.data.shapes import teaches
from muxtune.data.tokens import Mask, TableBuilder, TokenizedFile
from muxtune.data.types import Example, Shape
from muxtune.errors import StateError

Cancelled = Callable[[], bool]


class ExampleRenderer(Protocol):
    """What is needed of `render.Renderer`."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def train_on(self) -> str: ...
    def render(self, examples: Sequence[Example]) -> list[Rendered | Rejected]: ...


def never() -> bool:
    return False


def tokenize_file(
    path: str,
    declared: Shape | None,
    renderer: ExampleRenderer,
    cache: TokenCache | None = None,
    cancelled: Cancelled = never,
) -> tuple[TokenizedFile, bool]:
    """The file's tokens, and whether they came from the cache.

    Raises DataError (DataFileError with every bad line), StateError where `cancelled` came true.
    """
    if cache is None:
        return _tokenize(ExampleReader(path, declared), renderer, cancelled), False
    key = cache_key(file_sha256=file_sha256(path), declared=declared, renderer=renderer.fingerprint)
    if (entry := cache.load(key)) is not None:
        return entry, True
    made = _tokenize(ExampleReader(path, declared), renderer, cancelled)
    # Stored under the digest of the bytes that were parsed: the file may have changed since it was looked up.
    cache.store(cache_key(file_sha256=made.sha256, declared=declared, renderer=renderer.fingerprint), made)
    return made, False


def _tokenize(reader: ExampleReader, renderer: ExampleRenderer, cancelled: Cancelled) -> TokenizedFile:
    builder = TableBuilder()
    systems: set[str | None] = set()
    chat = False
    for batch in reader.batches():
        if cancelled():
            raise StateError("reading the data was cancelled", where=reader.path)
        systems.update(_system(record.example) for record in batch)
        chat = chat or any(record.example.messages for record in batch)
        _render(batch, renderer, reader, builder)
    reader.finish()
    assert reader.shape is not None
    system = systems.pop() if len(systems) == 1 else None
    return TokenizedFile(builder.build(), reader.shape, reader.sha256, system, chat)


def _render(batch: list[Record], renderer: ExampleRenderer, reader: ExampleReader, builder: TableBuilder) -> None:
    rendered = iter(renderer.render([part for record in batch for part in record.example.group]))
    for record in batch:
        example = record.example
        results = [next(rendered) for _ in example.group]
        refused = next((result for result in results if isinstance(result, Rejected)), None)
        if refused is not None:
            reader.problems.add(example.line, refused.code, refused.message, record.clip)
            continue
        for result in results:
            assert not isinstance(result, Rejected)
            builder.add(result.ids, trained_mask(example, result, renderer.train_on), example.line)


def trained_mask(example: Example, result: Rendered, train_on: str) -> Mask:
    """The targets of one part of `example`: the renderer's, or none where the example's answers say nothing."""
    taught = teaches(example) or (train_on == "all" and example.rejected is None)
    return result.mask if taught else np.zeros_like(result.mask)


def _system(example: Example) -> str | None:
    first = example.messages[0] if example.messages else None
    return first.content if first is not None and first.role == "system" else None
