"""Writes the preference pairs of `dpo.yaml`: the bare shell command is chosen, the same command amid chatter rejected.

    python examples/make_pairs.py [FOLDER]        # default: examples/pairs

Requests and commands are those of `make_data.py`, held-out words included; the chatter was written for this file. Both
responses are right, so what is learnt is the manner alone. The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from make_data import SEED, Part, Task, draw, to_shell

TRAIN_PAIRS, HELDOUT_PAIRS = 64, 8
CHATTER = (
    "Sure! You can use this command: {command}",
    "Of course. Here is how to do it: {command}",
    "Great question! Just type {command} and you are done.",
    "I would be happy to help. Try {command}",
    "The command that you are looking for is {command}",
    "No problem! Open a terminal and run {command}",
)


def pairs(part: Part, count: int) -> str:
    """The lines of a file, in OpenAI's preference format."""
    rng = random.Random(f"{SEED} pairs {part}")
    task = Task("pairs", "", to_shell)
    return "".join(
        json.dumps(
            {
                "input": {"messages": [{"role": "user", "content": prompt}]},
                "preferred_output": [{"role": "assistant", "content": command}],
                "non_preferred_output": [{"role": "assistant", "content": rng.choice(CHATTER).format(command=command)}],
            }
        )
        + "\n"
        for prompt, command in draw(task, part, count)
    )


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bare.jsonl").write_text(pairs("train", TRAIN_PAIRS), encoding="utf-8")
    (folder / "bare.heldout.jsonl").write_text(pairs("heldout", HELDOUT_PAIRS), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pairs")
