"""A task's metrics on disk: `metrics.jsonl` and `metrics.csv`, one row an optimizer step and one an evaluation.

Names are those that trackers know (`train/loss`, `eval/loss`, ...); a dpo task has TRL's `rewards/...` in place of the
token accuracy. Rows are appended and flushed; `cut` drops rows
beyond a checkpoint when a run is resumed, so that no step appears twice. A half-written last row is dropped likewise.
The JSON lines are the truth and `cut` makes the CSV from them anew, so the two agree whatever a crash left. JSON has no
NaN: a number that is not finite is null there and empty in the CSV.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from muxtune.durable import sync, write_durably
from muxtune.spec.event import EvalResult, Rewards, StepResult

JSONL, CSV = "metrics.jsonl", "metrics.csv"
STEP = "train/global_step"
COLUMNS = (
    STEP,
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
_ACCURACY = "token_accuracy"
_REWARDS = ("rewards/accuracies", "rewards/chosen", "rewards/rejected", "rewards/margins")
DPO_COLUMNS = tuple(
    column
    for name in COLUMNS
    for column in ([name.replace(_ACCURACY, one) for one in _REWARDS] if name.endswith(_ACCURACY) else [name])
)
Row = Mapping[str, float | int | None]


def step_row(result: StepResult) -> Row:
    """The row of an optimizer step."""
    return {
        STEP: result.step,
        "train/epoch": round(result.epoch, 6),
        "train/loss": _finite(result.loss),
        "train/learning_rate": result.lr,
        "train/grad_norm": _finite(result.grad_norm),
        **_accuracy("train", result.accuracy, result.rewards),
        "train/num_trained_tokens": result.tokens,
        "train/num_input_tokens": result.input_tokens,
        "train/step_time_s": round(result.time_s, 6),
    }


def eval_row(result: EvalResult) -> Row:
    """The row of an evaluation."""
    return {
        STEP: result.step,
        "eval/loss": _finite(result.loss),
        **_accuracy("eval", result.accuracy, result.rewards),
        "eval/num_trained_tokens": result.tokens,
    }


def columns_of(method: Literal["sft", "dpo"]) -> tuple[str, ...]:
    """The columns of a task's CSV."""
    return DPO_COLUMNS if method == "dpo" else COLUMNS


class MetricsFiles:
    """The two files in a task's folder."""

    def __init__(self, folder: Path, columns: Sequence[str] = COLUMNS) -> None:
        self._jsonl, self._csv = folder / JSONL, folder / CSV
        self._columns = columns

    def append(self, row: Row) -> None:
        with open(self._jsonl, "a", encoding="utf-8") as file:
            file.write(_json_text([row]))
        fresh = not self._csv.exists()
        with open(self._csv, "a", encoding="utf-8", newline="") as file:
            file.write(_csv_text([row], self._columns, header=fresh))

    def rows(self) -> list[Row]:
        """All rows up to the first that is not whole: what follows it was written after the damage was done."""
        found: list[Row] = []
        if not self._jsonl.exists():
            return found
        for line in self._jsonl.read_bytes().splitlines(keepends=True):
            row = _row(line)
            if row is None:
                break
            found.append(row)
        return found

    def cut(self, step: int) -> None:
        """Keep rows up to `step` only."""
        kept = [row for row in self.rows() if (row[STEP] or 0) <= step]
        write_durably(self._jsonl, _json_text(kept).encode())
        write_durably(self._csv, _csv_text(kept, self._columns, header=True).encode())

    def sync(self) -> None:
        """What has been appended survives a power cut from here on: called before a checkpoint that includes it."""
        for path in (self._jsonl, self._csv):
            if path.exists():
                sync(path)


def _accuracy(part: str, accuracy: float, rewards: Rewards | None) -> Row:
    if rewards is None:
        return {f"{part}/{_ACCURACY}": accuracy}
    values = (accuracy, *map(_finite, (rewards.chosen, rewards.rejected, rewards.margin)))
    return {f"{part}/{name}": value for name, value in zip(_REWARDS, values, strict=True)}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _row(line: bytes) -> Row | None:
    """The row of a line, None where it is not a whole one."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get(STEP)) is int else None


def _json_text(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in rows)


def _csv_text(rows: Iterable[Row], columns: Sequence[str], *, header: bool) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
