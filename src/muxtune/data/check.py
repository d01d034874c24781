"""`muxtune data check`: everything that reading a file would complain about, as a value.

Without a tokenizer only the file itself is judged; with one, the template's refusals and the lengths as well. Clips of
bad lines are in the report, because it is made for the person who asked: it does not belong in a log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from muxtune.data.dataset import Selection, Source, assemble
from muxtune.data.problems import DataFileError, LineProblem
from muxtune.data.reader import read_examples
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
    problems: tuple[LineProblem, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    error: str | None = None
    data: DataReport | None = None  # where a tokenizer was given

    @property
    def ok(self) -> bool:
        return self.error is None

    def lines(self) -> list[str]:
        """For a terminal."""
        if self.error is not None:
            return self.error.splitlines()
        if self.data is not None:
            return self.data.lines()
        told = [f"{self.path}: {self.shape}, {count_examples(self.examples)}"]
        if self.unanswered.count:
            told.append(f"warning: {count_examples(self.unanswered.count)} without an answer: {self.unanswered}")
        return told

    def to_json(self) -> dict[str, object]:
        """The same for a program: plain JSON values."""
        return {
            "path": self.path,
            "ok": self.ok,
            "shape": self.shape,
            "examples": self.examples,
            "unanswered": self.unanswered.count,
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
    try:
        if renderer is not None and selection is not None:
            data = assemble([Source(path, declared)], None, renderer, selection).report
            return CheckReport(path, data.files[0].shape, data.files[0].examples, data=data)
        return _check_text(path, declared)
    except DataFileError as error:
        counts = tuple(sorted(error.counts.items()))
        return CheckReport(path, problems=error.problems, counts=counts, error=str(error))
    except DataError as error:
        return CheckReport(path, error=str(error))


def _check_text(path: str, declared: Shape | None) -> CheckReport:
    examples = read_examples(path, declared)
    lines = [example.line for example in examples if not teaches(example)]
    if len(lines) == len(examples):
        hint = "loss is on assistant turns with `weight` 1 and on completions; none has any text"
        raise DataError("no example has an answer to train on", where=path, hint=hint)
    return CheckReport(path, examples[0].shape, len(examples), unanswered=Places.of([(path, lines)]))
