"""Which tokens: BOS and EOS once, and names of special tokens in anyone's text stay text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muxtune.data.render import Renderer
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example, Message
from tests.data.folders import FAMILIES, make_folder, template
from tests.data.rendering import NOW, TWO, Open, example, refused, render

# --- BOS and EOS, once


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.adds_bos])
def test_bos_is_there_once_whoever_adds_it(open_renderer: Open, name: str) -> None:
    """Report: rendering to text and tokenising again doubled BOS; dropping it then lost EOS."""
    renderer = open_renderer(name)
    bos, eos = renderer.tokenizer.bos_id, renderer.tokenizer.eos_id
    chat = render(renderer, example(TWO[:2])).ids.tolist()
    assert chat.count(bos) == FAMILIES[name].template.count("bos_token"), "the template's own, never a second"
    for one in (
        Example("f", 1, "text", completion="some text"),
        Example("f", 1, "prompt_completion", prompt="some", completion="text"),
    ):
        result = render(renderer, one)
        assert result.ids.tolist().count(bos) == 1 and result.ids[0] == bos
        assert result.ids.tolist().count(eos) == 1 and result.ids[-1] == eos and result.mask[-1]


def test_prompt_and_completion_are_tokenised_apart(open_renderer: Open) -> None:
    renderer = open_renderer("llama-3")
    result = render(renderer, Example("f", 1, "prompt_completion", prompt="How many us", completion="ers are there?"))
    prompt = renderer.prompt_ids("How many us")
    completion = [*renderer.tokenizer.encode("ers are there?"), renderer.tokenizer.eos_id]
    assert result.ids.tolist() == [*prompt.tolist(), *completion]
    assert result.mask.tolist() == [False] * len(prompt) + [True] * len(completion)
    assert prompt[0] == renderer.tokenizer.bos_id and prompt.dtype == np.int32


def test_an_empty_prompt_leaves_the_first_token_untrained(open_renderer: Open) -> None:
    result = render(open_renderer("chatml"), Example("f", 1, "prompt_completion", prompt="", completion="ab"))
    assert result.mask.tolist() == [False] + [True] * (len(result.ids) - 1)


def test_a_text_is_trained_but_for_its_first_token(open_renderer: Open) -> None:
    for name in ("chatml", "llama-3"):
        result = render(open_renderer(name, train_on="all"), Example("f", 1, "text", completion="some text"))
        assert result.mask.tolist() == [False] + [True] * (len(result.ids) - 1)


def test_a_tokenizer_that_adds_eos_adds_it_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, FAMILIES["llama-3"])
    value = json.loads((folder / "tokenizer.json").read_text())
    eos = {"SpecialToken": {"id": "<|end_of_text|>", "type_id": 0}}
    value["post_processor"]["single"].append(eos)
    value["post_processor"]["special_tokens"]["<|end_of_text|>"] = {
        "id": "<|end_of_text|>",
        "ids": [1],
        "tokens": ["<|end_of_text|>"],
    }
    (folder / "tokenizer.json").write_text(json.dumps(value))
    renderer = Renderer(TextTokenizer.from_folder(folder), now=NOW)
    assert renderer.tokenizer.encode("a", add_special_tokens=True)[-1] == 1
    for one in (
        Example("f", 1, "text", completion="a"),
        Example("f", 1, "prompt_completion", prompt="b", completion="a"),
    ):
        assert render(renderer, one).ids.tolist().count(1) == 1
    assert renderer.prompt_ids("a").tolist() == [0, *renderer.tokenizer.encode("a")], "a prompt is not over"


def test_eos_is_trained_though_it_is_the_padding_too(tmp_path: Path) -> None:
    """Report: `pad = eos`, a collator that masks padding, and a model that never stops."""
    folder = make_folder(tmp_path, FAMILIES["llama-2"], pad="</s>")
    renderer = Renderer(TextTokenizer.from_folder(folder), now=NOW)
    assert renderer.tokenizer.pad_id == renderer.tokenizer.eos_id == 2
    for one in (
        example(TWO),
        Example("f", 1, "text", completion="a"),
        Example("f", 1, "prompt_completion", prompt="b", completion="a"),
    ):
        result = render(renderer, one)
        assert result.ids[-1] == 2 and result.mask[-1]
        assert result.mask[result.ids == 2].all()
    renderer.close()


# --- special tokens in anyone's text stay text

FORGERIES = [
    "{eot}",
    "x{eot}\n{start}",
    "{eot}{eot}",
    "say {eot} twice {eot} ok",
    "{head}",
    "{tail}",
    "{head}{tail}",
    " {tail} and {head} ",
    "<s></s><unk>",
]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_names_of_special_tokens_in_a_text_stay_text(
    family_renderers: dict[str, Renderer], name: str, forgery: str
) -> None:
    renderer = family_renderers[name]
    end = renderer.tokenizer.decode([renderer.end_of_turn_id or 0])
    text = forgery.format(eot=end, start=FAMILIES[name].special[-1], head=end[:-1], tail=end[1:])
    control = {renderer.tokenizer.token_id(token) for token in renderer.tokenizer.special_tokens}
    plain = render(renderer, example([("user", "q"), ("assistant", "B"), ("user", "q"), ("assistant", "D")]))
    forged = render(renderer, example([("user", text), ("assistant", "B"), ("user", text), ("assistant", "x" + text)]))
    keep = [i for i in plain.ids.tolist() if i in control]
    assert [i for i in forged.ids.tolist() if i in control] == keep, "the same turns"
    assert text.strip() in renderer.tokenizer.decode(forged.ids.tolist())
    assert (forged.ids[forged.mask] == renderer.end_of_turn_id).sum() == 2
    prompt = renderer.render_prompt([Message("user", text)]).tolist()
    assert [i for i in prompt if i in control] == [
        i for i in renderer.render_prompt([Message("user", "q")]).tolist() if i in control
    ]


@pytest.mark.parametrize("shape", ["text", "prompt_completion"])
def test_rows_without_a_template_keep_special_names_as_text(open_renderer: Open, shape: Any) -> None:
    renderer = open_renderer("llama-3")
    text = "x<|eot_id|>y<|end_of_text|><|begin_of_text|>"
    prompt = None if shape == "text" else text
    result = render(renderer, Example("f", 1, shape, prompt=prompt, completion=text))
    special = [i for i in result.ids.tolist() if i < 5]
    assert special == [0, 1], "BOS and EOS, ours"
    assert renderer.tokenizer.decode(result.ids[1:-1].tolist()) == text * (1 if prompt is None else 2)


def test_names_in_tool_arguments_keys_and_roles_stay_text(open_renderer: Open) -> None:
    renderer = open_renderer("qwen2.5")
    call = {"type": "function", "function": {"name": "f<|im_end|>", "arguments": {"<|im_start|>k": "<|im_end|>"}}}
    messages = (
        Message("user", "A"),
        Message("assistant", "", extra={"tool_calls": [call]}),
        Message("user<|im_end|>", "B"),
        Message("assistant", "D"),
    )
    tools = ({"type": "function", "function": {"name": "f", "description": "<|im_start|>system", "<|im_end|>": 1}},)
    result = render(renderer, Example("f", 1, "messages", messages=messages, tools=tools))
    ids = result.ids.tolist()
    assert ids.count(1) == ids.count(2) == 5, "tools, and four turns"


def test_a_template_that_reads_special_names_in_texts_is_refused(open_renderer: Open) -> None:
    source = template("chatml").replace("m.content", "m.content.replace('<|im_end|>', '')")
    problem = refused(open_renderer("chatml", source), example([("user", "a<|im_end|>"), ("assistant", "B")]))
    assert problem.code == "special_token_in_text" and "template of chatml" in problem.message


def test_tokens_that_are_not_special_are_read_in_texts(open_renderer: Open) -> None:
    """A thought in the data is trained with the model's own tokens for it."""
    renderer = open_renderer("qwen3")
    result = render(renderer, example([("user", "A"), ("assistant", "<think>Hm</think>B")]))
    assert renderer.tokenizer.token_id("<think>") in result.ids[result.mask]
