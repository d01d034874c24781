"""`samples.jsonl`: what a task answered to its job's `sample_prompts`, a line a reply, by optimizer step.

Like the metrics it is appended to, cut back to the checkpoint when a run is resumed, and on disk before a checkpoint
that includes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from muxtune.durable import sync, write_durably
from muxtune.spec.event import TaskEvent

SAMPLES = "samples.jsonl"


class SamplesFile:
    """The file in a task's folder; there from the first reply on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SAMPLES

    def append(self, event: TaskEvent) -> None:
        row = {"step": event.step, "prompt": event.data["prompt"], "reply": event.data["reply"]}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def cut(self, step: int) -> None:
        """Keep whole lines up to `step` only."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_bytes().splitlines(keepends=True) if _step(line) <= step]
        write_durably(self._path, b"".join(kept))

    def sync(self) -> None:
        if self._path.exists():
            sync(self._path)


def _step(line: bytes) -> float:
    """The step of a line; beyond all steps where the line is not whole."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
