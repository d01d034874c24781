"""Replies to `sample_prompts`: when they are asked for, where they are kept, and that they change nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.samples import SamplesFile
from muxtune.engine.task import Sequences, Task
from muxtune.errors import ConfigError
from muxtune.spec.event import EvalResult, RunEvent, TaskEvent
from tests.engine.build import Trial, attach, backbone_of
from tests.sequences import random_sequences

TRIAL = Trial("sql", lengths=[9, 12, 20, 7], batch=2, steps=4, r=2)


def _task(engine: Engine, *, prompts: tuple[str, ...] = ("a", "b"), validation: bool = False) -> Task:
    task = attach(engine, TRIAL)
    task.job = task.job.model_copy(update={"sample_prompts": prompts, "eval_steps": 2 if validation else None})
    if validation:
        held_out = random_sequences([5, 6], seed=9)
        task.data = Sequences(task.data.train, held_out)
        engine.sources[task.validation_source] = held_out
    return task


def _answers(task: Task) -> list[tuple[str, str]]:
    return [(prompt, f"{prompt} at {task.step}") for prompt in task.job.sample_prompts]


def _samples(events: list[RunEvent]) -> list[tuple[int, str, str]]:
    found = [event for event in events if isinstance(event, TaskEvent) and event.kind == "sample"]
    return [(event.step, str(event.data["prompt"]), str(event.data["reply"])) for event in found]


def test_at_the_end_where_nothing_is_held_out() -> None:
    engine = Engine(backbone_of())
    _task(engine)
    events = list(Runner(engine, sampler=_answers).run())
    assert _samples(events) == [(4, "a", "a at 4"), (4, "b", "b at 4")]


def test_with_every_evaluation() -> None:
    engine = Engine(backbone_of())
    _task(engine, prompts=("a",), validation=True)
    events = list(Runner(engine, sampler=_answers).run())
    assert _samples(events) == [(2, "a", "a at 2"), (4, "a", "a at 4")]
    kinds = [type(event) is EvalResult for event in events if isinstance(event, EvalResult) or _samples([event])]
    assert kinds == [True, False, True, False], "a reply follows its evaluation"


def test_no_prompts_no_question() -> None:
    engine = Engine(backbone_of())
    _task(engine, prompts=())
    asked: list[str] = []

    def sampler(task: Task) -> list[tuple[str, str]]:
        asked.append(task.name)
        return []

    list(Runner(engine, sampler=sampler).run())
    assert not asked


def test_a_prompt_that_cannot_be_answered_fails_nobody() -> None:
    def refuse(task: Task) -> list[tuple[str, str]]:
        raise ConfigError("the prompt has 300 tokens", where="prompt")

    engine = Engine(backbone_of())
    task = _task(engine)
    events = list(Runner(engine, sampler=refuse).run())
    warnings = [event.message for event in events if isinstance(event, TaskEvent) and event.kind == "warning"]
    assert warnings == ["sample_prompts: the prompt has 300 tokens"] and task.step == 4
    undisturbed = Engine(backbone_of())
    other = attach(undisturbed, TRIAL)
    list(Runner(undisturbed).run())
    assert torch.equal(task.adapter.parameters.values, other.adapter.parameters.values)


def test_the_file_is_cut_back_to_a_checkpoint(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path)
    file.cut(3)
    file.sync()
    assert not (tmp_path / "samples.jsonl").exists(), "only a reply makes the file"
    for step in (2, 4, 6):
        file.append(TaskEvent("sample", "sql", step, data={"prompt": "a\nb", "reply": "\N{SNOWMAN}"}))
    with open(tmp_path / "samples.jsonl", "a") as raw:
        raw.write('{"step": 2, "prompt": "cut o')  # killed while it wrote
    file.cut(4)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"], row["reply"]) for row in rows] == [
        (2, "a\nb", "\N{SNOWMAN}"),
        (4, "a\nb", "\N{SNOWMAN}"),
    ]
    assert (tmp_path / "samples.jsonl").read_bytes().endswith(b"\n")
