"""A data file -> `Example`s, with every bad line found in one pass.

    line -> strict JSON (lines.py, strict_json.py) -> the file's layout (shapes.py) -> Example

The first line that fits a layout decides it for the whole file; nothing is guessed again half-way through. Preference
pairs of one file are all conversations or all bare texts, likewise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from muxtune.data.lines import read_lines
from muxtune.data.problems import LineError, ProblemList
from muxtune.data.shapes import Layout, detect, to_example
from muxtune.data.strict_json import type_name
from muxtune.data.types import Example, Shape
from muxtune.errors import DataError


@dataclass(frozen=True, slots=True)
class Record:
    """An example with the clip of its raw line, for a later stage that refuses it, and its size in the file."""

    example: Example
    clip: str
    size: int


class ExampleReader:
    """Reads one file once: iterate, then `finish`.

    `declared` is the shape the user named, None to detect it. Lines that are refused are skipped and kept in
    `problems`, to which later stages may add.
    """

    def __init__(self, path: str, declared: Shape | None = None) -> None:
        self.path = path
        self.problems = ProblemList()
        self.examples = 0
        self._declared = declared
        self._layout: Layout | None = None
        self._chat: bool | None = None  # of preference pairs
        self._digest = hashlib.sha256()

    @property
    def shape(self) -> Shape | None:
        """The file's shape, once a line has decided it."""
        return self._layout.shape if self._layout else self._declared

    @property
    def sha256(self) -> str:
        """Of the bytes read so far: of the whole file, after iteration."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Record]:
        for line in read_lines(self.path, self._digest):
            try:
                example = self._convert(line.value, line.number)
            except LineError as refused:
                self.problems.add(line.number, refused.code, refused.message, line.clip)
            else:
                self.examples += 1
                yield Record(example, line.clip, line.size)

    def batches(self, examples: int = 256, size: int = 4 << 20) -> Iterator[list[Record]]:
        """Records in lists of at most `examples`, ended early once they sum to `size`: bounded memory for renderers."""
        batch: list[Record] = []
        held = 0
        for record in self:
            batch.append(record)
            held += record.size
            if len(batch) == examples or held >= size:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def finish(self) -> None:
        """Raises DataFileError with all problems, or DataError where the file held no example."""
        self.problems.raise_if_any(self.path)
        if not self.examples:
            raise DataError("the file is empty", where=self.path, hint="write one JSON object per line")

    def _convert(self, value: object, number: int) -> Example:
        if isinstance(value, LineError):
            raise value
        if not isinstance(value, dict):
            raise LineError("not_object", f"expected an object, got {type_name(value)}")
        if self._layout is None:
            self._layout = detect(value, self._declared)
        example = to_example(value, self._layout, self._declared, self.path, number)
        if example.rejected is not None:
            self._require_same_form(bool(example.messages))
        return example

    def _require_same_form(self, chat: bool) -> None:
        if self._chat is None:
            self._chat = chat
        if chat != self._chat:
            kinds = ("a conversation", "bare text")
            line, file = kinds if chat else kinds[::-1]
            raise LineError("other_shape", f"the pair is {line}, the pairs of the file are {file}")


def read_examples(path: str, declared: Shape | None = None) -> tuple[Example, ...]:
    """All examples of a file. Raises DataError (DataFileError where lines are bad)."""
    reader = ExampleReader(path, declared)
    examples = tuple(record.example for record in reader)
    reader.finish()
    return examples
