"""The demo's data is what its generator writes, and a held-out prompt can be answered only by what was learned."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = EXAMPLES / "data"
TASKS = ("json", "sql", "redact", "intent", "shell", "emoji", "persona")
HELDOUT = dict.fromkeys(TASKS, 20) | {"persona": 10}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLES / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_data"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def read(name: str) -> list[tuple[str, str, str]]:
    """The (system, prompt, answer) of every line of a file."""
    chats = []
    for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        assert all(set(message) == {"role", "content"} for message in messages)
        chats.append(tuple(message["content"] for message in messages))
    return chats


def normal(prompt: str) -> str:
    return "".join(char for char in prompt.casefold() if char.isalnum())


def test_the_folder_holds_the_seven_tasks_and_nothing_else() -> None:
    assert {path.name for path in DATA.iterdir()} == {f"{t}{s}.jsonl" for t in TASKS for s in ("", ".heldout")}


def test_the_files_are_what_the_generator_writes(generator: ModuleType, tmp_path: Path) -> None:
    generator.write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in DATA.iterdir()}


@pytest.mark.parametrize("task", TASKS)
def test_sizes_and_content(task: str) -> None:
    train, heldout = read(task), read(f"{task}.heldout")
    assert len(train) == 96 and len(heldout) == HELDOUT[task]
    assert len({system for system, _, _ in train + heldout}) == 1
    for chat in train + heldout:
        assert all(text and text == text.strip() and len(text) < 80 for text in chat)


def test_no_heldout_prompt_occurs_in_any_training_file() -> None:
    trained = {normal(prompt) for task in TASKS for _, prompt, _ in read(task)}
    for task in TASKS:
        prompts = [normal(prompt) for _, prompt, _ in read(f"{task}.heldout")]
        assert len(set(prompts)) == len(prompts)
        assert trained.isdisjoint(prompts), task


def test_system_messages_tell_the_tasks_apart() -> None:
    assert len({read(task)[0][0] for task in TASKS}) == len(TASKS)


def test_no_answer_of_one_task_is_an_answer_of_another() -> None:
    answers = {t: {answer for _, _, answer in read(t) + read(f"{t}.heldout")} for t in TASKS}
    assert sum(map(len, answers.values())) == len(set().union(*answers.values()))


@pytest.mark.parametrize("task", ["json", "sql", "shell"])
def test_heldout_answers_cannot_have_been_memorised(task: str) -> None:
    trained = {answer for _, _, answer in read(task)}
    assert all(answer not in trained for _, _, answer in read(f"{task}.heldout"))


@pytest.mark.parametrize("task", ["intent", "emoji"])
def test_labels_are_balanced(task: str) -> None:
    """No adapter can pass by always giving one label."""
    answers = [answer for _, _, answer in read(f"{task}.heldout")][:10]
    most = max(answers.count(label) for label in set(answers))
    assert most < 8


def test_json_answers_parse_and_state_the_facts_of_their_sentence() -> None:
    for _, prompt, answer in read("json") + read("json.heldout"):
        facts = json.loads(answer)
        assert list(facts) == ["name", "age", "job", "city"]
        assert all(str(fact) in prompt for fact in facts.values())


def test_sql_answers_run_on_the_schema_of_the_system_message() -> None:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE users (name TEXT, age INT, city TEXT)")
    database.execute("CREATE TABLE cars (name TEXT, speed INT)")
    for _, _, answer in read("sql") + read("sql.heldout"):
        database.execute(answer)


def test_redacted_answers_hide_every_phone_and_email() -> None:
    for _, prompt, answer in read("redact") + read("redact.heldout"):
        assert prompt != answer and "@" not in answer and not any(char.isdigit() for char in answer)


def test_a_task_with_too_few_distinct_prompts_is_an_error(generator: ModuleType) -> None:
    same = generator.Task("same", "Say.", lambda pick: iter([("one", "1")] * 1000))
    with pytest.raises(SystemExit, match="same: its words make only 1 distinct train prompts, 2 are needed"):
        generator.draw(same, "train", 2)
