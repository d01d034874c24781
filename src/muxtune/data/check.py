"""`muxtune data check`: everything that reading a file would complain about, as a value.

Without a tokenizer only the file itself is judged; with one, the template's refusals and the lengths as well. Clips of
bad lines are in the report, because it is made for the person who asked: it does not belong in a log.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from muxtune.data.dataset import Selection, Source, assemble
from muxtune.data.problems import DataFileError, LineProblem
from muxtune.data.reader import ExampleReader
from muxtune.data.report import DataReport, Places, count_examples
from muxtune.data.shapes import teaches
from muxtune.data.tokenize import ExampleRenderer
from muxtune.data.types import Shape
from muxtune.errors import DataError


@dataclass(frozen=True, slots=True)
class CheckReport:
    """`ok` decides the exit status. `problems` are the first ten bad lines, `counts` (code, lines) all of them."""

    path: str
    shape: Shape | None = None
    examples: int = 0
    unanswered: Places = field(default_factory=Places)  # examples without an answer: dropped in training
    same_responses: Places = field(default_factory=Places)  # preference pairs that compare nothing
    problems: tuple[LineProblem, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    error: str | None = None
    data: DataReport | None = None  # where a tokenizer was given

    @property
    def ok(self) -> bool:
        return self.error is None

    def lines(self) -> list[str]:
        """For a terminal."""
        if self.data is not None:
            return self.data.lines()
        told = [f"{self.path}: {self.shape}, {count_examples(self.examples)}"]
        if self.error is not None:
            told = self.error.splitlines()
        said = (
            (self.unanswered, "without an answer"),
            (self.same_responses, "whose chosen and rejected responses are equal, which teaches nothing"),
        )
        return told + [
            f"warning: {count_examples(places.count)} {what}: {places}" for places, what in said if places.count
        ]

    def to_json(self) -> dict[str, object]:
        """The same for a program: plain JSON values."""
        return {
            "path": self.path,
            "ok": self.ok,
            "shape": self.shape,
            "examples": self.examples,
            "unanswered": self.unanswered.count,
            "same_responses": self.same_responses.count,
            "bad_lines": dict(self.counts),
            "problems": [
                {"line": one.line, "code": one.code, "message": one.message, "clip": one.clip} for one in self.problems
            ],
            "error": self.error,
            "data": self.data.to_json() if self.data else None,
        }


def check_file(
    path: str,
    declared: Shape | None = None,
    *,
    renderer: ExampleRenderer | None = None,
    selection: Selection | None = None,
) -> CheckReport:
    """The report on a file; never raises for what is wrong with its data.

    `renderer` and `selection` (both or neither) add what the tokenizer, the template and `max_length` say.
    """
    seen = _Seen()
    try:
        if renderer is not None and selection is not None:
            data = assemble([Source(path, declared)], None, renderer, selection).report
            return CheckReport(path, data.files[0].shape, data.files[0].examples, data=data)
        return seen.read(path, declared)
    except DataFileError as error:
        counts = tuple(sorted(error.counts.items()))
        if renderer is not None:  # the good lines beside the bad ones are judged all the same
            with suppress(DataError):
                seen.read(path, declared)
        return seen.report(path, None, problems=error.problems, counts=counts, error=str(error))
    except DataError as error:
        return CheckReport(path, error=str(error))


@dataclass(slots=True)
class _Seen:
    """What the good lines of a file are like, bad ones among them or not."""

    examples: int = 0
    unanswered: list[int] = field(default_factory=list)
    same_responses: list[int] = field(default_factory=list)

    def read(self, path: str, declared: Shape | None) -> CheckReport:
        reader = ExampleReader(path, declared)
        for example in (record.example for record in reader):
            self.examples += 1
            if not teaches(example):
                self.unanswered.append(example.line)
            elif example.rejected is not None and replace(example, rejected=None) == example.rejected:
                self.same_responses.append(example.line)
        reader.finish()
        if len(self.unanswered) == self.examples:
            hint = "loss is on assistant turns with `weight` 1 and on completions; none has any text"
            raise DataError("no example has an answer to train on", where=path, hint=hint)
        return self.report(path, reader.shape)

    def report(self, path: str, shape: Shape | None, **more: Any) -> CheckReport:
        return CheckReport(
            path,
            shape,
            self.examples,
            unanswered=Places.of([(path, self.unanswered)]),
            same_responses=Places.of([(path, self.same_responses)]),
            **more,
        )
