"""What is trained: the right tokens, or a refusal with the template's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxtune.data.render import Rejected, Rendered, Renderer, trained_turns
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example, Message
from muxtune.errors import DataError
from tests.data.folders import FAMILIES, make_folder, template

NOW = datetime(2026, 3, 9)
Turns = Sequence[tuple[str, str]]
TWO: Turns = [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)

Open = Callable[..., Renderer]


@pytest.fixture
def open_renderer(tmp_path: Path) -> Iterator[Open]:
    """`open_renderer(family, source=None, **options)`: a renderer of a family's tokenizer, closed afterwards."""
    opened: list[Renderer] = []

    def make(family: str = "chatml", source: str | None = None, **options: Any) -> Renderer:
        folder = make_folder(tmp_path / f"{family}-{len(opened)}", FAMILIES[family], template=source)
        opened.append(Renderer(TextTokenizer.from_folder(folder), now=NOW, **options))
        return opened[-1]

    yield make
    for renderer in opened:
        renderer.close()


def example(turns: Turns, **extra: Any) -> Example:
    return Example("f.jsonl", 7, "messages", messages=tuple(Message(*turn) for turn in turns), **extra)


def render(renderer: Renderer, one: Example) -> Rendered:
    (result,) = renderer.render([one])
    assert isinstance(result, Rendered), result
    assert result.ids.dtype == np.int32 and result.mask.dtype == np.bool_ and result.ids.shape == result.mask.shape
    assert not result.mask[:1].any()
    return result


def refused(renderer: Renderer, one: Example) -> Rejected:
    (result,) = renderer.render([one])
    assert isinstance(result, Rejected), result
    return result


def trained(renderer: Renderer, one: Example) -> list[str]:
    """The text of each run of trained tokens."""
    result = render(renderer, one)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], result.mask, [False]])))
    return [renderer.tokenizer.decode(result.ids[a:b].tolist()) for a, b in borders.reshape(-1, 2)]


# --- conversations: which turns


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_every_answer_is_trained_with_its_end_of_turn_and_nothing_else(open_renderer: Open, name: str) -> None:
    """Report: of several turns, all but the last answer masked."""
    runs = trained(open_renderer(name), example(TWO))
    expected = FAMILIES[name].trained.strip()
    assert [run.strip() for run in runs] == [expected, expected.replace("B", "D")]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_alone(open_renderer: Open, name: str) -> None:
    runs = trained(open_renderer(name, train_on="last_assistant"), example(TWO))
    assert [run.strip() for run in runs] == [FAMILIES[name].trained.strip().replace("B", "D")]


def test_all_is_everything_but_the_first_token(open_renderer: Open) -> None:
    result = render(open_renderer(train_on="all"), example(TWO))
    assert result.mask.tolist() == [False] + [True] * (len(result.ids) - 1)


def test_completion_means_the_answers(open_renderer: Open) -> None:
    assert trained(open_renderer(train_on="completion"), example(TWO)) == ["B<|im_end|>", "D<|im_end|>"]


def test_a_message_decides_for_itself(open_renderer: Open) -> None:
    turns = (
        Message("user", "A"),
        Message("assistant", "B", train=False),
        Message("user", "C"),
        Message("assistant", "D"),
    )
    flagged = Example("f", 1, "messages", messages=turns)
    assert trained(open_renderer(), flagged) == ["D<|im_end|>"]
    everything = render(renderer := open_renderer(train_on="all"), flagged)
    left_out = renderer.tokenizer.decode(everything.ids[1:][~everything.mask[1:]].tolist())
    assert left_out == "B<|im_end|>"
    asked = Example("f", 1, "messages", messages=(*turns[:2], Message("user", "C", train=True)))
    assert trained(open_renderer(), asked) == ["<|im_start|>user\nC<|im_end|>"]
    first = Example(
        "f", 1, "messages", messages=(Message("user", "A"), Message("assistant", "B", train=True), *turns[2:])
    )
    assert trained(open_renderer(train_on="last_assistant"), first) == ["B<|im_end|>", "D<|im_end|>"]


def test_which_turns_are_trained() -> None:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [Message(role, "x") for role in roles]
    assert trained_turns(messages, "assistant") == [role == "assistant" for role in roles]
    assert trained_turns(messages, "last_assistant") == [False] * 4 + [True, False]
    assert trained_turns(messages, "all") == [True] * 6


def test_a_conversation_without_an_answer_trains_nothing(open_renderer: Open) -> None:
    assert not render(open_renderer(), example([("user", "A")])).mask.any()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.text("ab <>|\n[]s/é", min_size=1, max_size=12), min_size=2, max_size=6))
def test_the_prompt_of_sampling_is_what_precedes_each_answer(
    shared: dict[str, Renderer], name: str, contents: list[str]
) -> None:
    """Targets begin exactly where the prompt that a sampler is given ends, whatever the texts."""
    renderer = shared[name]
    turns = [(("user", "assistant")[k % 2], text) for k, text in enumerate(contents)]
    (result,) = renderer.render([example(turns)])
    if isinstance(result, Rejected):
        assert result.code == "token_over_border"
        return
    starts = np.flatnonzero(np.diff(result.mask.astype(int)) == 1) + 1
    answers = [k for k, (role, _) in enumerate(turns) if role == "assistant"]
    assert len(starts) == len(answers)
    for start, k in zip(starts, answers, strict=True):
        prompt = renderer.render_prompt([Message(*turn) for turn in turns[:k]])
        between = renderer.tokenizer.decode(result.ids[len(prompt) : start].tolist())
        same = min(len(prompt), int(start))
        assert not between.strip(), "only whitespace that merges with the template's is no target"
        assert result.ids[: same - 1].tolist() == prompt[: same - 1].tolist()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Renderer]]:
    root = tmp_path_factory.mktemp("shared")
    made = {
        name: Renderer(TextTokenizer.from_folder(make_folder(root / name, family)), now=NOW)
        for name, family in FAMILIES.items()
    }
    yield made
    for renderer in made.values():
        renderer.close()


# --- conversations: the mask is right or the example is refused


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(open_renderer: Open) -> None:
    problem = refused(open_renderer("qwen3"), example(TWO))
    assert problem.code == "template_not_prefix"
    assert "template of qwen3" in problem.message and "message 2" in problem.message


def test_what_the_generation_prompt_supplies_is_no_target(open_renderer: Open) -> None:
    supplied = template("qwen3").replace("enable_thinking is defined and enable_thinking is false", "true")
    assert supplied != template("qwen3")
    one = example(TWO[:2])
    assert trained(open_renderer("qwen3", supplied), one) == ["B<|im_end|>"]
    assert trained(open_renderer("qwen3"), one) == ["<think>\n\n</think>\n\nB<|im_end|>"], "here the model writes it"


def test_generation_blocks_tell_what_prefixes_cannot(open_renderer: Open) -> None:
    blocks = template("qwen3").replace(
        "{{- content + '<|im_end|>\\n' }}", "{% generation %}{{- content }}{% endgeneration %}{{- '<|im_end|>\\n' }}", 1
    )
    assert blocks.count("generation") == template("qwen3").count("generation") + 2
    assert trained(open_renderer("qwen3", blocks), example(TWO)) == ["B<|im_end|>", "D<|im_end|>"]


def test_a_generation_block_with_its_header_loses_the_header(open_renderer: Open) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + (m.content if loop.last else m.content | upper) + '<|im_end|>' }}"
        "{% endgeneration %}{{ '\n' }}{% else %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert trained(open_renderer("chatml", source), example(turns)) == ["B<|im_end|>", "d<|im_end|>"]


def test_a_template_without_generation_blocks_is_masked_all_the_same(open_renderer: Open) -> None:
    """Report: `assistant_only_loss` with such a template masked everything."""
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    assert "generation %}" not in source
    assert trained(open_renderer("chatml", source), example(TWO)) == [" B<|im_end|>", " D<|im_end|>"]


def test_a_template_that_ignores_the_generation_prompt_is_refused(open_renderer: Open) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    with pytest.raises(DataError, match="add_generation_prompt"):
        open_renderer("chatml", source).render([example(TWO)])
    everything = open_renderer("chatml", source, train_on="all").render([example(TWO)])
    assert isinstance(everything[0], Rendered), "no mask, no question"


def test_a_token_that_reaches_over_the_border_of_a_turn_is_refused(open_renderer: Open) -> None:
    """The generation prompt ends with a space, which byte-level BPE joins with the answer's first word."""
    source = template("vicuna").replace("'ASSISTANT:' }}", "'ASSISTANT: ' }}")
    assert source != template("vicuna")
    problem = refused(open_renderer("vicuna", source), example([("user", "A"), ("assistant", "answer")]))
    assert problem.code == "token_over_border" and "template of vicuna" in problem.message


def test_a_line_break_that_joins_the_templates_own_is_no_target(open_renderer: Open) -> None:
    source = (
        "{% for m in messages %}{{ m.role + '\n\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
    )
    renderer = open_renderer("llama-3", source)
    one = example([("user", "A"), ("assistant", "\n\nB")])
    (run,) = trained(renderer, one)
    assert run.strip("\n") == "B<|end_of_text|>"


@pytest.mark.parametrize(
    "source, shown",
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + messages[0].missing }}", "has no attribute 'missing'"),
        ("{{ messages[9].content }}", "line 1"),
    ],
)
def test_a_template_that_fails_is_named_and_quotes_no_data(open_renderer: Open, source: str, shown: str) -> None:
    problem = refused(open_renderer("chatml", source), example([("user", "secret"), ("assistant", "B")]))
    assert problem.code == "template_error"
    assert "template of chatml" in problem.message and shown in problem.message and "secret" not in problem.message


def test_an_answer_that_the_template_leaves_out_is_refused(open_renderer: Open) -> None:
    source = template("chatml").replace("m.content", "('' if m.content == 'D' else m.content)")
    problem = refused(open_renderer("chatml", source), example(TWO))
    assert problem.code == "turn_left_out" and "message 4" in problem.message


def test_a_conversation_that_the_assistant_opens_is_refused_where_its_start_cannot_be_told(open_renderer: Open) -> None:
    problem = refused(open_renderer("chatml"), example([("assistant", "B")]))
    assert problem.code == "template_not_prefix"


def test_what_a_template_writes_at_the_very_end_belongs_to_no_turn(open_renderer: Open) -> None:
    renderer = open_renderer("phi-3")
    result = render(renderer, example(TWO))
    assert result.ids[-1] == renderer.tokenizer.token_id("<|endoftext|>") and not result.mask[-1]


def test_the_only_closing_token_is_trained_though_it_comes_at_the_very_end(open_renderer: Open) -> None:
    source = (
        "{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    renderer = open_renderer("chatml", source)
    assert trained(renderer, example(TWO)) == ["B\n", "D\n<|im_end|>"]
    assert renderer.eos_ids == (2,)


# --- tools


@pytest.mark.parametrize(
    "one, what",
    [
        (example(TWO, tools=TOOLS), "the tools"),
        (
            Example(
                "f",
                7,
                "messages",
                messages=(Message("user", "A"), Message("assistant", "", extra={"tool_calls": [CALL]})),
            ),
            "the tool calls",
        ),
    ],
)
def test_a_template_that_ignores_tools_is_refused_unless_told_so(open_renderer: Open, one: Example, what: str) -> None:
    problem = refused(open_renderer("chatml"), one)
    assert problem.code == "tools_ignored"
    assert "template of chatml" in problem.message and what in problem.message
    assert trained(open_renderer("chatml", ignore_tools=True), one)[-1].endswith("<|im_end|>")


def test_a_template_that_leaves_out_tool_results_is_refused(open_renderer: Open) -> None:
    source = template("chatml").replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    turns = [("user", "A"), ("tool", "21 degrees"), ("assistant", "B")]
    assert "tool results" in refused(open_renderer("chatml", source), example(turns)).message


def test_a_template_that_crashes_on_a_call_without_content_is_named(open_renderer: Open) -> None:
    source = template("chatml").replace("m.content", "(m.content or none)")
    one = Example(
        "f", 7, "messages", messages=(Message("user", "A"), Message("assistant", "", extra={"tool_calls": [CALL]}))
    )
    problem = refused(open_renderer("chatml", source), one)
    assert problem.code == "template_error"
    assert "template of chatml" in problem.message and "NoneType" in problem.message


def test_tool_calls_and_answers_are_trained_and_results_are_not(open_renderer: Open) -> None:
    messages = (
        Message("user", "Weather?"),
        Message("assistant", "", extra={"tool_calls": [CALL]}),
        Message("tool", "sunny"),
        Message("tool", "warm"),
        Message("assistant", "Sunny."),
    )
    call, answer = trained(open_renderer("qwen2.5"), Example("f", 1, "messages", messages=messages, tools=TOOLS))
    assert call.startswith("<tool_call>") and '"city": "Rome"' in call and call.endswith("</tool_call><|im_end|>")
    assert answer == "Sunny.<|im_end|>"


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
    import json

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
def test_names_of_special_tokens_in_a_text_stay_text(shared: dict[str, Renderer], name: str, forgery: str) -> None:
    renderer = shared[name]
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


# --- the rest


def test_a_bad_example_does_not_touch_its_neighbours(open_renderer: Open) -> None:
    renderer = open_renderer("mistral")
    results = renderer.render([example(TWO), example([("system", "S"), *TWO]), example(TWO)])
    assert isinstance(results[1], Rejected)
    first, last = results[0], results[2]
    assert isinstance(first, Rendered) and isinstance(last, Rendered)
    assert first.ids.tolist() == last.ids.tolist() and first.mask.tolist() == last.mask.tolist()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{% endif %}",
    ],
)
def test_a_template_that_attacks_fails_the_whole_file_by_name(open_renderer: Open, source: str) -> None:
    from muxtune.data.sandbox import Limits

    with pytest.raises(DataError, match="template of chatml"):
        open_renderer("chatml", source, limits=Limits(time_s=2)).render([example(TWO)] * 1000)


def test_the_date_is_the_jobs_and_in_the_fingerprint_only_where_used(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(make_folder(tmp_path, FAMILIES["chatml"]))
    dated = "{{ strftime_now('%Y') }}" + template("chatml")
    later = datetime(2031, 1, 1)
    renderers = [Renderer(tokenizer, template=source, now=now) for source in (None, dated) for now in (NOW, later)]
    plain, plain_later, with_date, with_date_later = (renderer.fingerprint for renderer in renderers)
    assert plain == plain_later and with_date != with_date_later
    ids = renderers[2].render_prompt([Message("user", "A")]).tolist()
    assert tokenizer.decode(ids).startswith("2026<|im_start|>")
    for renderer in renderers:
        renderer.close()


def test_the_fingerprint_follows_whatever_changes_tokens_or_mask(open_renderer: Open) -> None:
    renderers = [
        open_renderer(),
        open_renderer(train_on="last_assistant"),
        open_renderer(ignore_tools=True),
        open_renderer(template="plain"),
        open_renderer("llama-3"),
    ]
    assert len({renderer.fingerprint for renderer in renderers}) == len(renderers)
    assert open_renderer().fingerprint == renderers[0].fingerprint


def test_a_prompt_that_the_template_refuses_is_a_data_error(open_renderer: Open) -> None:
    with pytest.raises(DataError, match="System role not supported"):
        open_renderer("gemma").render_prompt([Message("system", "S"), Message("user", "A")])
