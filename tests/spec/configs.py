"""config.md's examples, word for word, and a writer of config files."""

from __future__ import annotations

from pathlib import Path

from muxtune.spec import ResolvedRun, load_run

THREE = """\
# three.yaml
base_model: smollm2-135m-instruct
output_dir: runs/three
defaults:
  peft: {type: lora, r: 8, lora_alpha: 16, target_modules: all-linear}
  max_length: 512
  learning_rate: 2e-3
  warmup_steps: 3
  max_steps: 24
  per_device_train_batch_size: 4
  seed: 7
jobs:
  - name: sql
    datasets: [{path: data/sql.jsonl}]                      # shape detected
    validation: {path: data/sql.val.jsonl, eval_steps: 12}
  - name: shell
    datasets: [{path: data/shell.jsonl, type: messages}]    # alias: chat_template
    peft: {r: 16, lora_alpha: 32, target_modules: [q_proj, v_proj]}   # same type: merged over defaults.peft
    learning_rate: 1e-3
  - name: sentiment
    datasets: [{path: data/sentiment.jsonl}]
    peft: {type: ia3}                                       # another type: defaults.peft is not inherited
    learning_rate: 3e-2
"""

SWEEP = """\
# sweep.yaml: the matrix applies to every job; a job may say `matrix: false`
base_model: smollm2-135m-instruct
output_dir: runs/sql-sweep
defaults:
  datasets: [{path: data/sql.jsonl}]
  validation: {path: data/sql.val.jsonl, eval_steps: 12}
  max_steps: 48
jobs: [{name: sql}]
matrix:
  grid:
    learning_rate: [5e-4, 1e-3, 2e-3]
    "peft.r,peft.lora_alpha": [[4, 8], [8, 16], [16, 32]]   # varied together
  exclude: [{learning_rate: 2e-3, peft.r: 16}]
  # random: {samples: 16, seed: 1, learning_rate: {log_uniform: [1e-4, 1e-2]}}
  halving: {metric: eval/loss, mode: min, at_steps: [12, 24], keep: 0.5}
"""

# The third job; and lines of the sweep that ask for what is not supported yet.
IA3_JOB = THREE[THREE.index("  - name: sentiment") :]
HALVING = SWEEP[SWEEP.index("  halving:") :]

HEAD = "base_model: m\noutput_dir: out\n"
JOB = HEAD + "datasets: [a.jsonl]\n"  # a flat job


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(text: str, *sets: str, name: str = "run.yaml") -> ResolvedRun:
    """The run of a config in the working directory, so that its places read `run.yaml:3`."""
    write(Path(), text, name)
    return load_run(name, sets)
