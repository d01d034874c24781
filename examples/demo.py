"""Seven tasks learn at once on one frozen backbone, then each adapter answers every task's prompts. `make demo`.

    1. the base model answers each task's held-out prompts (no prompt of theirs occurs in a training file)
    2. all jobs of demo.yaml train together, one pass of the backbone a step, whatever their PEFT types
    3. the cross table: every adapter answers every task's prompts, mixed in one batch; an answer counts when it is
       equal to the expected one, character by character
    4. the adapters are saved, and the same work runs task by task with transformers + peft (with_peft.py, a slice)

All that is printed was computed in this run. The exit status is 0 when every task has at most 1 of 10 exact before,
at least 8 of 10 after, and no adapter more than 1 exact on another task's prompts. About four minutes on 2 cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import muxtune as mt
from muxtune.data.types import Message
from muxtune.spec import load_run
from muxtune.spec.peft import type_name

HERE = Path(__file__).resolve().parent
OUTPUT = Path("runs/make-demo")
PROMPTS, OTHERS_PROMPTS = 10, 5  # asked of a task's own adapter, and of each of the others
SLICE_STEPS = 2  # optimizer steps of each task with transformers + peft
BASE = "(base)"


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt, as the messages before the answer, and its one right answer."""

    messages: tuple[Message, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Cell:
    """What one adapter said to one task's prompts."""

    questions: Sequence[Question]
    replies: Sequence[str]

    @property
    def exact(self) -> int:
        return sum(reply == question.answer for reply, question in zip(self.replies, self.questions, strict=True))

    @property
    def asked(self) -> int:
        return len(self.questions)


Table = Mapping[tuple[str, str], Cell]  # (adapter, task whose prompts it answers)


@dataclass(frozen=True, slots=True)
class Pace:
    """Work done and the time it took; `tokens` are real ones, prompts included, padding not."""

    tokens: int
    seconds: float
    memory_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    started = time.perf_counter()
    run = load_run(HERE / "demo.yaml").run
    types = {job.name: type_name(job.peft) for job in run.jobs}
    names = list(types)
    questions = {name: read_questions(HERE / "data" / f"{name}.heldout.jsonl") for name in names}

    print(f"Loading {run.base_model}, once")
    engine = mt.Engine(run.base_model)
    print(f"Asking the base model {PROMPTS} held-out prompts of each of {len(names)} tasks")
    before = ask(engine, [BASE], questions)

    for job in run.jobs:
        engine.attach(job)
    pace = train(engine, types)

    print("\nAsking every adapter every task's prompts, all adapters in one batch")
    after = ask(engine, names, questions)
    show_answers(before, after)
    show_table(before, after, types)

    print("\nThe adapters, as peft loads them:")
    for name in names:
        print(f"  {engine.save(name, OUTPUT / name, overwrite=True)}")

    print(f"\nThe same work task by task with transformers + peft, {SLICE_STEPS} steps of each task ...")
    show_pace(pace, with_peft(engine.base.path), len(names))

    faults = judge(before, after)
    print(f"\n{'; '.join(faults) if faults else 'Every check holds'}. {time.perf_counter() - started:.0f} s in all.")
    return 1 if faults else 0


def read_questions(path: Path) -> list[Question]:
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines()[:PROMPTS]:
        *asking, answer = json.loads(line)["messages"]
        questions.append(Question(tuple(Message(**message) for message in asking), answer["content"]))
    return questions


def ask(engine: mt.Engine, adapters: Sequence[str], questions: Mapping[str, Sequence[Question]]) -> Table:
    """Every adapter's replies to every task's prompts; the prompts of one task go through the backbone together."""
    table = {}
    for task, all_questions in questions.items():
        cells = {}
        for adapter in adapters:
            own = adapter in (task, BASE)
            cells[adapter] = all_questions if own else all_questions[:OTHERS_PROMPTS]
        requests = [
            (None if adapter == BASE else adapter, question.messages)
            for adapter, asked in cells.items()
            for question in asked
        ]
        replies = iter(engine.generate(requests, max_new_tokens=longest_answer_tokens(engine, all_questions)))
        for adapter, asked in cells.items():
            table[adapter, task] = Cell(asked, [next(replies) for _ in asked])
    return table


def longest_answer_tokens(engine: mt.Engine, questions: Sequence[Question]) -> int:
    """Tokens of the longest right answer with its end-of-turn token, and one more: what runs on is not exact."""
    return 2 + max(len(engine.preparer.tokenizer.encode(question.answer)) for question in questions)


def train(engine: mt.Engine, types: Mapping[str, str]) -> Pace:
    """Train everything that is attached, showing each task's PEFT type, and its loss every third step."""
    names = list(types)
    print(f"\nTraining {len(names)} tasks of {len(set(types.values()))} PEFT types on one backbone: the loss of each")
    print(" " * 8 + "".join(f"{name:>10}" for name in names))
    print(" " * 8 + "".join(f"{types[name]:>10}" for name in names) + "   tokens/s")
    started, tokens, losses = time.perf_counter(), 0, dict[str, float]()
    for result in engine.run():
        tokens += result.input_tokens
        losses[result.task] = result.loss
        if result.task == names[-1] and result.step % 3 == 0:
            speed = tokens / (time.perf_counter() - started)
            row = "".join(f"{losses[name]:10.4f}" for name in names)
            print(f"step {result.step:<3}{row}{speed:11.0f}", flush=True)
    return Pace(tokens, time.perf_counter() - started, memory_bytes())


def show_answers(before: Table, after: Table) -> None:
    """One held-out prompt of each task, and what base and adapter reply."""
    for adapter, task in after:
        if adapter == task:
            question = after[task, task].questions[0]
            print(f"\n{task}: {question.messages[-1].content}")
            print(f"   before  {clip(before[BASE, task].replies[0])}")
            print(f"   after   {clip(after[task, task].replies[0])}")


def clip(text: str, width: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def show_table(before: Table, after: Table, types: Mapping[str, str]) -> None:
    """Rows: who answers, and of which PEFT type it is. Columns: whose prompts."""
    print("\nExact answers: each row is an adapter, each column the held-out prompts of a task")
    print(" " * 18 + "".join(f"{task:>9}" for task in types))
    for adapter in (BASE, *types):
        cells = [before[BASE, task] if adapter == BASE else after[adapter, task] for task in types]
        row = "".join(f"{f'{cell.exact}/{cell.asked}':>9}" for cell in cells)
        print(f"{adapter:8} {types.get(adapter, ''):9}{row}")


def judge(before: Table, after: Table) -> list[str]:
    """What the demo promised and did not keep."""
    faults = [
        f"the base model alone solves {cell.exact}/{cell.asked} of {task}"
        for (_, task), cell in before.items()
        if cell.exact > 1
    ]
    for (adapter, task), cell in after.items():
        if adapter == task and cell.exact < 0.8 * cell.asked:
            faults.append(f"{task} learned only {cell.exact}/{cell.asked}")
        if adapter != task and cell.exact > 1:
            faults.append(f"{adapter} solves {cell.exact}/{cell.asked} of {task}")
    return faults


def with_peft(model: Path) -> Pace:
    """The pace of transformers + peft on the same jobs, in a process of its own with as many threads."""
    script = map(str, (HERE / "with_peft.py", model, HERE / "demo.yaml", SLICE_STEPS))
    command = [sys.executable, "-W", "ignore", *script]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Pace(**json.loads(output.splitlines()[-1]))


def show_pace(ours: Pace, theirs: Pace, tasks: int) -> None:
    print(f"{'':22}{'tokens/s':>10}{'tokens':>9}{'memory':>9}")
    for label, pace, count in (("muxtune, all at once", ours, tasks), ("peft, one by one", theirs, 1)):
        memory = f"{pace.memory_bytes / 2**30:.2f}G"
        print(f"{label:22}{pace.tokens_per_s:10.0f}{pace.tokens:9}{memory:>9}   for {count} task{'s' * (count > 1)}")
    print(f"{ours.tokens_per_s / theirs.tokens_per_s:.2f} times the tokens a second")


def memory_bytes() -> int:
    """Memory of this process: its proportional share of shared pages where the system tells it, else all its pages."""
    usage = psutil.Process().memory_full_info()
    return int(getattr(usage, "pss", usage.rss))


if __name__ == "__main__":
    sys.exit(main())
