"""Chat templates: ids equal transformers' `apply_chat_template`, and where a template comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from muxtune.data.render import Rejected, Rendered, Renderer
from muxtune.data.template import BUNDLED_NAMES, find_template
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example, Message
from muxtune.errors import DataError
from tests.data.folders import FAMILIES, make_folder

NOW = datetime(2026, 3, 9)
NO_SYSTEM = ("gemma", "mistral")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]

Turns = Sequence[tuple[str, str]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[PreTrainedTokenizerBase, Renderer]]]:
    root = tmp_path_factory.mktemp("templates")
    made = {}
    for name, family in FAMILIES.items():
        folder = make_folder(root / name, family)
        # Every token is a target, so that no example is refused for its mask: here only ids matter.
        renderer = Renderer(TextTokenizer.from_folder(folder), now=NOW, train_on="all")
        made[name] = (AutoTokenizer.from_pretrained(folder), renderer)
    yield made
    for _, renderer in made.values():
        renderer.close()


def example(turns: Turns, **extra: object) -> Example:
    messages = tuple(Message(role, content) for role, content in turns)
    return Example("f.jsonl", 1, "messages", messages=messages, **extra)  # type: ignore[arg-type]


def as_dicts(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS: dict[str, Turns] = {
    "one answer": [("user", "Hello"), ("assistant", "Hi there.")],
    "two answers": [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")],
    "spaces": [("user", "  lead and trail \n"), ("assistant", "\n\n x  ")],
    "unicode": [("user", "Caf\u0065\u0301 \N{SNOWMAN}\u00a0\u3042"), ("assistant", "\N{PILE OF POO}\N{SNOWMAN}")],
    "markup": [("user", "a < b > c </p> [x] {y} {{ z }} {% if %} <|"), ("assistant", "|> <| ``` <th")],
    "empty question": [("user", ""), ("assistant", "Hi")],
    "system": [("system", "Be brief."), ("user", "A"), ("assistant", "B")],
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_ids_equal_apply_chat_template(
    pairs: dict[str, tuple[PreTrainedTokenizerBase, Renderer]], name: str, kind: str
) -> None:
    theirs, renderer = pairs[name]
    turns = CONVERSATIONS[kind]
    (result,) = renderer.render([example(turns)])
    if kind == "system" and name in NO_SYSTEM:
        assert isinstance(result, Rejected) and result.code == "template_error"
        with pytest.raises(TemplateError):
            theirs.apply_chat_template(as_dicts(turns))
        return
    assert isinstance(result, Rendered)
    assert result.ids.tolist() == theirs.apply_chat_template(as_dicts(turns), return_dict=False)
    prompt = turns[:-1]
    expected = theirs.apply_chat_template(as_dicts(prompt), add_generation_prompt=True, return_dict=False)
    assert renderer.render_prompt([Message(*turn) for turn in prompt]).tolist() == expected


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=2, max_size=4))
def test_ids_equal_apply_chat_template_for_any_text(
    pairs: dict[str, tuple[PreTrainedTokenizerBase, Renderer]], name: str, contents: list[str]
) -> None:
    theirs, renderer = pairs[name]
    turns = [(("user", "assistant")[k % 2], text) for k, text in enumerate(contents)]
    (result,) = renderer.render([example(turns)])
    assert isinstance(result, Rendered)
    assert result.ids.tolist() == theirs.apply_chat_template(as_dicts(turns), return_dict=False)


def test_tools_and_thoughts_reach_the_template_as_in_transformers(
    pairs: dict[str, tuple[PreTrainedTokenizerBase, Renderer]],
) -> None:
    theirs, renderer = pairs["qwen2.5"]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 1}}}
    messages = (
        Message("user", "Weather?"),
        Message("assistant", "", extra={"tool_calls": [call]}),
        Message("tool", "sunny", extra={"tool_call_id": "1"}),
        Message("tool", "warm"),
        Message("assistant", "Sunny."),
    )
    given_to_theirs = [{"role": m.role, "content": m.content, **(m.extra or {})} for m in messages]
    (result,) = renderer.render([Example("f", 1, "messages", messages=messages, tools=tuple(TOOLS))])
    assert isinstance(result, Rendered)
    expected = theirs.apply_chat_template(given_to_theirs, tools=TOOLS, return_dict=False)
    assert result.ids.tolist() == expected

    theirs, renderer = pairs["qwen3"]
    thinking = (Message("user", "A"), Message("assistant", "B", extra={"reasoning": "Hm."}))
    (result,) = renderer.render([Example("f", 1, "messages", messages=thinking)])
    assert isinstance(result, Rendered)
    dicts = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": "Hm."}]
    assert result.ids.tolist() == theirs.apply_chat_template(dicts, return_dict=False)
    assert "Hm." in renderer.tokenizer.decode(result.ids.tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_finds_the_end_of_turn(pairs: dict[str, tuple[PreTrainedTokenizerBase, Renderer]], name: str) -> None:
    """Report: adapters that never stop, as only `<|end_of_text|>` was known and not `<|eot_id|>`."""
    theirs, renderer = pairs[name]
    ends = {"llama-3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi-3": "<|end|>"}
    expected = theirs.convert_tokens_to_ids(ends.get(name, theirs.eos_token))
    assert renderer.end_of_turn_id == expected
    assert renderer.eos_ids == tuple(dict.fromkeys((theirs.eos_token_id, expected)))


def test_a_template_for_tools_is_used_for_examples_with_tools(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, FAMILIES["chatml"])
    (folder / "additional_chat_templates").mkdir()
    for_tools = "{{ tools | tojson }}" + FAMILIES["chatml"].template
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    theirs = AutoTokenizer.from_pretrained(folder)
    turns = [("user", "A"), ("assistant", "B")]
    with Renderer(TextTokenizer.from_folder(folder), now=NOW, train_on="all") as renderer:
        plain, tooled = renderer.render([example(turns), example(turns, tools=tuple(TOOLS))])
    assert isinstance(plain, Rendered) and isinstance(tooled, Rendered)
    assert plain.ids.tolist() == theirs.apply_chat_template(as_dicts(turns), return_dict=False)
    assert tooled.ids.tolist() == theirs.apply_chat_template(as_dicts(turns), tools=TOOLS, return_dict=False)


def trained_text(renderer: Renderer, turns: Turns) -> str:
    (result,) = renderer.render([example(turns)])
    assert isinstance(result, Rendered), result
    return renderer.tokenizer.decode(result.ids[result.mask].tolist())


@pytest.mark.parametrize("name", BUNDLED_NAMES)
@pytest.mark.parametrize("family", ["chatml", "llama-2", "mistral"])
def test_bundled_templates_end_a_turn_with_one_token_of_any_tokenizer(tmp_path: Path, name: str, family: str) -> None:
    folder = make_folder(tmp_path, FAMILIES[family], template="")
    with Renderer(TextTokenizer.from_folder(folder), template=name, now=NOW) as renderer:
        trained = trained_text(
            renderer, [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
        )
        end = FAMILIES[family].eos
        assert trained.replace(" ", "") == f"B{end}D{end}"
        assert renderer.end_of_turn_id == renderer.tokenizer.token_id(end)
        assert renderer.template_source and "message" in renderer.template_source


def test_bundled_chatml_is_chatml(tmp_path: Path) -> None:
    """Byte for byte where the tokenizer has its tokens, so that other tools with the same template agree."""
    folder = make_folder(tmp_path, FAMILIES["chatml"], template="")
    turns = [("user", "A"), ("assistant", "B")]
    with Renderer(TextTokenizer.from_folder(folder), template="chatml", now=NOW) as renderer:
        (result,) = renderer.render([example(turns)])
        assert isinstance(result, Rendered)
        text = renderer.tokenizer.decode(result.ids.tolist())
    assert text == "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"


def test_a_template_is_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(FAMILIES["chatml"].template)
    folder = make_folder(tmp_path / "model", FAMILIES["chatml"], template="{{ 'the other' }}")
    with Renderer(TextTokenizer.from_folder(folder), template=str(file), now=NOW) as renderer:
        assert trained_text(renderer, [("user", "A"), ("assistant", "B")]) == "B<|im_end|>"


@pytest.mark.parametrize("value, shown", [("nowhere.jinja", "chatml"), ("cahtml", "chatml"), (".", "chatml")])
def test_a_template_that_is_nowhere_is_refused_with_the_bundled_names(
    tmp_path: Path, value: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = TextTokenizer.from_folder(make_folder(tmp_path / "model", FAMILIES["chatml"]))
    with pytest.raises(DataError) as caught:
        find_template(value, tokenizer)
    assert value in str(caught.value) and shown in str(caught.value)


def test_conversations_without_a_template_are_refused_with_a_way_out(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(make_folder(tmp_path, FAMILIES["chatml"], template=""))
    renderer = Renderer(tokenizer, now=NOW)
    assert renderer.template_source is None and renderer.end_of_turn_id is None
    assert renderer.eos_ids == (tokenizer.eos_id,)
    with pytest.raises(DataError) as caught:
        renderer.render([example([("user", "A"), ("assistant", "B")])])
    assert "f.jsonl:1" in str(caught.value) and "chat_template: chatml" in str(caught.value)
    (row,) = renderer.render([Example("f.jsonl", 1, "text", completion="no template needed")])
    assert isinstance(row, Rendered)
