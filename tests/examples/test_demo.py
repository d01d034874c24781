"""What the demo promises is judged by what was answered, and its configs are the contract's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from peft import get_peft_model

from muxtune.data.types import Message
from muxtune.models import attention
from muxtune.models.backbone import Backbone
from muxtune.spec import Lora, load_run
from muxtune.spec.peft import read_peft, type_name
from tests.tiny import tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ("json", "sql", "redact", "intent", "shell", "emoji", "persona")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return _load("demo")


def _load(name: str) -> ModuleType:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(f"muxtune_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def tables(demo: ModuleType, before: int, diagonal: int, elsewhere: int) -> tuple[dict, dict]:
    """Tables of two tasks in which the given numbers of 10 (5 off the diagonal) are exact."""
    questions = [demo.Question((Message("user", f"prompt {i}"),), f"answer {i}") for i in range(10)]

    def cell(asked: int, exact: int) -> object:
        replies = [q.answer if i < exact else q.answer + "." for i, q in enumerate(questions[:asked])]
        return demo.Cell(questions[:asked], replies)

    tasks = ("sql", "shell")
    first = {(demo.BASE, task): cell(10, before) for task in tasks}
    second = {(a, t): cell(10, diagonal) if a == t else cell(5, elsewhere) for a in tasks for t in tasks}
    return first, second


@pytest.mark.parametrize(("before", "diagonal", "elsewhere"), [(0, 10, 0), (1, 8, 1)])
def test_kept_promises_have_no_faults(demo: ModuleType, before: int, diagonal: int, elsewhere: int) -> None:
    assert demo.judge(*tables(demo, before, diagonal, elsewhere)) == []


@pytest.mark.parametrize(
    ("before", "diagonal", "elsewhere", "fault"),
    [
        (2, 10, 0, "the base model alone solves 2/10 of sql"),
        (0, 7, 0, "sql learned only 7/10"),
        (0, 10, 2, "sql solves 2/5 of shell"),
    ],
)
def test_each_broken_promise_is_told(demo: ModuleType, before: int, diagonal: int, elsewhere: int, fault: str) -> None:
    faults = demo.judge(*tables(demo, before, diagonal, elsewhere))
    assert fault in faults and len(faults) == 2


def test_an_answer_is_exact_to_the_character(demo: ModuleType) -> None:
    question = demo.Question((Message("user", "list docs"),), "ls docs")
    replies = ["ls docs", "ls docs ", "LS docs", "ls docs\n", ""]
    assert demo.Cell([question] * 5, replies).exact == 1


def test_every_task_has_enough_heldout_prompts(demo: ModuleType) -> None:
    for task in TASKS:
        questions = demo.read_questions(EXAMPLES / "data" / f"{task}.heldout.jsonl")
        assert len(questions) == demo.PROMPTS == 10
        assert all([message.role for message in question.messages] == ["system", "user"] for question in questions)


def test_demo_config_is_seven_jobs_of_four_types() -> None:
    run = load_run(EXAMPLES / "demo.yaml").run
    assert tuple(job.name for job in run.jobs) == TASKS
    assert {type_name(job.peft) for job in run.jobs} == {"lora", "dora", "ia3", "ln_tuning"}
    for job in run.jobs:
        assert (job.max_steps, job.effective_batch, job.warmup_steps) == (24, 4, 3)
        if isinstance(job.peft, Lora):
            assert (job.peft.r, job.peft.lora_alpha, job.learning_rate) == (8, 16, 2e-3)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # peft of the norms that it tunes
@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "ln_tuning"])
def test_the_other_side_trains_as_many_numbers(name: str) -> None:
    """The slice with transformers + peft is of the same adapters."""
    with_peft = _load("with_peft")
    spec = read_peft(name)
    attention.register()
    places = Backbone(tiny_model("llama")).places
    model = get_peft_model(tiny_model("llama"), with_peft.peft_config(spec))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == spec.parameters(places)  # type: ignore[union-attr]
    model.unload()


@pytest.mark.parametrize(("config", "jobs"), [("three.yaml", 3), ("sweep.yaml", 8)])
def test_the_other_configs_name_files_that_exist(config: str, jobs: int) -> None:
    run = load_run(EXAMPLES / config).run
    assert len(run.jobs) == jobs
    for job in run.jobs:
        paths = [dataset.path for dataset in job.datasets] + ([job.validation.path] if job.validation else [])
        assert all(Path(path).is_file() for path in paths)
