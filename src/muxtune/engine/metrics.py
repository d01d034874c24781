"""A task's metrics on disk: `metrics.jsonl` and `metrics.csv`, one row an optimizer step and one an evaluation.

Names are those that trackers know (`train/loss`, `eval/loss`, ...). Rows are appended and flushed; `cut` drops rows
beyond a checkpoint when a run is resumed, so that no step appears twice. A half-written last row is dropped likewise.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path

from muxtune.durable import write_durably
from muxtune.spec.event import EvalResult, StepResult

JSONL, CSV = "metrics.jsonl", "metrics.csv"
COLUMNS = (
    "train/global_step",
    "train/epoch",
    "train/loss",
    "train/learning_rate",
    "train/grad_norm",
    "train/token_accuracy",
    "train/num_trained_tokens",
    "train/num_input_tokens",
    "train/step_time_s",
    "eval/loss",
    "eval/token_accuracy",
    "eval/num_trained_tokens",
)
Row = Mapping[str, float | int]


def step_row(result: StepResult) -> Row:
    """The row of an optimizer step."""
    return {
        "train/global_step": result.step,
        "train/epoch": round(result.epoch, 6),
        "train/loss": result.loss,
        "train/learning_rate": result.lr,
        "train/grad_norm": result.grad_norm,
        "train/token_accuracy": result.accuracy,
        "train/num_trained_tokens": result.tokens,
        "train/num_input_tokens": result.input_tokens,
        "train/step_time_s": round(result.time_s, 6),
    }


def eval_row(result: EvalResult) -> Row:
    """The row of an evaluation."""
    return {
        "train/global_step": result.step,
        "eval/loss": result.loss,
        "eval/token_accuracy": result.accuracy,
        "eval/num_trained_tokens": result.tokens,
    }


class MetricsFiles:
    """The two files in a task's folder."""

    def __init__(self, folder: Path) -> None:
        self._jsonl, self._csv = folder / JSONL, folder / CSV

    def append(self, row: Row) -> None:
        """Add a row to both files."""
        with open(self._jsonl, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
        fresh = not self._csv.exists()
        with open(self._csv, "a", encoding="utf-8", newline="") as file:
            file.write(_csv_text([row], header=fresh))

    def rows(self) -> list[Row]:
        """All whole rows."""
        if not self._jsonl.exists():
            return []
        found: list[Row] = []
        for line in self._jsonl.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
        return found

    def cut(self, step: int) -> None:
        """Keep rows up to `step` only."""
        kept = [row for row in self.rows() if row["train/global_step"] <= step]
        write_durably(self._jsonl, "".join(json.dumps(dict(row)) + "\n" for row in kept).encode())
        write_durably(self._csv, _csv_text(kept, header=True).encode())


def _csv_text(rows: list[Row], *, header: bool) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
