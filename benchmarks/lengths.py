"""Sequence lengths of real data sets: measured once, stored as integers, so that every machine runs the same load.

`lengths.json` holds, for each data set, (prompt tokens, completion tokens) of 256 training examples drawn with a fixed
seed from chat files, rendered by the model's chat template and tokenised by its tokenizer. The completion is the
answer with its end-of-turn token. To measure again, with folders that hold `sst2/train.jsonl` and so on:

    python -m benchmarks.lengths DATA_FOLDER MODEL_FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STORED = Path(__file__).with_name("lengths.json")
DATA_SETS = ("sst2", "openbookqa", "rte")
EXAMPLES = 256


@dataclass(frozen=True, slots=True)
class Length:
    """One example, in tokens."""

    prompt: int
    completion: int


def stored_lengths() -> dict[str, list[Length]]:
    """The committed figures, by data set."""
    raw: dict[str, list[list[int]]] = json.loads(STORED.read_text())
    return {name: [Length(*pair) for pair in pairs] for name, pairs in raw.items()}


def measure(data: Path, model: Path) -> dict[str, list[Length]]:
    """Tokenise a sample of each data set under `data` with the tokenizer and template under `model`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    measured = {}
    for name in DATA_SETS:
        lines = (data / name / "train.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in random.Random(0).sample(lines, EXAMPLES)]
        measured[name] = [_measure_one(tokenizer, row["messages"]) for row in rows]
    return measured


def _measure_one(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> Length:
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # The line break after the end of turn trains nothing.
    whole_ids = tokenizer(whole.rstrip(), add_special_tokens=False)["input_ids"]
    return Length(len(prompt_ids), len(whole_ids) - len(prompt_ids))


def main() -> None:
    """Measure and overwrite `lengths.json`."""
    measured = measure(Path(sys.argv[1]), Path(sys.argv[2]))
    text = {name: [[one.prompt, one.completion] for one in lengths] for name, lengths in measured.items()}
    STORED.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(pairs)}' for name, pairs in text.items()) + "\n}\n")
    for name, lengths in measured.items():
        totals = sorted(one.prompt + one.completion for one in lengths)
        print(f"{name}: {totals[0]} / {totals[len(totals) // 2]} / {totals[-1]} tokens (shortest, median, longest)")


if __name__ == "__main__":
    main()
