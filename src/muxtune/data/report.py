"""What became of a job's data: counts and line numbers, for people (`lines`) and programs (`to_json`).

Boundary: no example text, so a report may be logged and sent in events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muxtune.data.lengths import LengthProfile
from muxtune.data.types import Shape

SHOWN = 10


@dataclass(frozen=True, slots=True)
class Places:
    """Lines that something happened to: how many, and the first ten of each file as (path, line)."""

    count: int = 0
    first: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, files: Iterable[tuple[str, list[int]]]) -> Places:
        places = cls()
        for path, lines in files:
            shown = ((path, line) for line in lines[:SHOWN])
            places = cls(places.count + len(lines), (*places.first, *shown))
        return places

    def __str__(self) -> str:
        by_path: dict[str, list[str]] = {}
        for path, line in self.first:
            by_path.setdefault(path, []).append(str(line))
        parts = [f"{path} line{'s' * (len(lines) > 1)} {', '.join(lines)}" for path, lines in by_path.items()]
        hidden = self.count - len(self.first)
        return "; ".join(parts) + (f" and {hidden} more" if hidden else "")


@dataclass(frozen=True, slots=True)
class FileReport:
    path: str
    shape: Shape
    sha256: str
    examples: int
    cached: bool  # its tokens came from the cache


@dataclass(frozen=True, slots=True)
class DataReport:
    """`train_*` and `validation_*` count what is trained and evaluated, after all policies and weights."""

    files: tuple[FileReport, ...]
    max_length: int
    train_sequences: int
    trained_tokens: int
    validation_sequences: int
    lengths: LengthProfile  # of the training sequences
    truncated: Places = Places()
    split: Places = Places()
    dropped_overlong: Places = Places()
    dropped_untrained: Places = Places()
    same_responses: Places = Places()  # preference pairs whose halves are one
    val_set_size: float = 0  # as it was asked for
    split_off: int = 0  # examples it holds out
    left: int = 0  # examples of the training files that it does not hold out, before weights

    @property
    def train_tokens(self) -> int:
        return self.lengths.tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing that the user may not have wanted, with its count and lines."""
        said = (
            (self.truncated, f"longer than {self.max_length} tokens, truncated"),
            (self.dropped_overlong, f"longer than {self.max_length} tokens, dropped"),
            (self.dropped_untrained, "with nothing to train on, dropped"),
            (self.same_responses, "whose chosen and rejected responses are equal, which teaches nothing"),
        )
        told = [f"{count_examples(places.count)} {what}: {places}" for places, what in said if places.count]
        if self.split_off and (self.split_off == 1 or self.split_off > self.left):
            told.append(f"val_set_size {self.val_set_size:g} {self._held_out}")
        return tuple(told)

    @property
    def _held_out(self) -> str:
        return f"holds out {count_examples(self.split_off)} of {self.split_off + self.left} and leaves {self.left}"

    def lines(self) -> list[str]:
        """For a terminal."""
        told = [f"{file.path}: {file.shape}, {count_examples(file.examples)}" for file in self.files]
        lengths = self.lengths
        told.append(
            f"train: {self.train_sequences} sequences, {self.train_tokens} tokens, {self.trained_tokens} trained; "
            f"lengths: median {lengths.percentile(50)}, 95% {lengths.percentile(95)}, longest {lengths.longest}"
        )
        if self.validation_sequences:
            split_off = f"; val_set_size {self._held_out}" if self.split_off else ""
            told.append(f"validation: {self.validation_sequences} sequences{split_off}")
        if self.split.count:
            told.append(f"{count_examples(self.split.count)} longer than {self.max_length} tokens, split: {self.split}")
        return told + [f"warning: {warning}" for warning in self.warnings]

    def to_json(self) -> dict[str, object]:
        """The same for a program: plain JSON values."""
        return {
            "files": [
                {"path": file.path, "shape": file.shape, "sha256": file.sha256, "examples": file.examples}
                for file in self.files
            ],
            "max_length": self.max_length,
            "train_sequences": self.train_sequences,
            "train_tokens": self.train_tokens,
            "trained_tokens": self.trained_tokens,
            "validation_sequences": self.validation_sequences,
            "lengths": {str(bound): count for bound, count in self.lengths.histogram()},
            "truncated": self.truncated.count,
            "split": self.split.count,
            "dropped_overlong": self.dropped_overlong.count,
            "dropped_untrained": self.dropped_untrained.count,
            "same_responses": self.same_responses.count,
            "split_off": self.split_off,
            "warnings": list(self.warnings),
        }


def count_examples(count: int) -> str:
    return f"{count} example{'s' * (count != 1)}"
