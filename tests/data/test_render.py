"""What is trained: the right tokens, or a refusal with the template's name."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxtune.data.render import Rejected, Rendered, Renderer, trained_turns
from muxtune.data.sandbox import Limits
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example, Message
from muxtune.errors import DataError
from tests.data.folders import FAMILIES, make_folder, template
from tests.data.rendering import NOW, TWO, Open, example, refused, render, trained

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
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.text("ab <>|\n[]s/é", min_size=1, max_size=12), min_size=2, max_size=6))
def test_the_prompt_of_sampling_is_what_precedes_each_answer(
    family_renderers: dict[str, Renderer], name: str, contents: list[str]
) -> None:
    """Targets begin exactly where the prompt that a sampler is given ends, whatever the texts."""
    renderer = family_renderers[name]
    turns = [(("user", "assistant")[k % 2], text) for k, text in enumerate(contents)]
    (result,) = renderer.render([example(turns)])
    if isinstance(result, Rejected):
        silent = any(re.fullmatch(r"\s*(</?s>\s*)+", text) for text in contents)  # nothing but names of tokens
        assert result.code == "token_over_border" or (result.code == "turn_left_out" and silent)
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


def test_an_answer_of_token_names_alone_is_refused_as_that(family_renderers: dict[str, Renderer]) -> None:
    (result,) = family_renderers["mistral"].render([example([("user", "a"), ("assistant", "<s>")])])
    assert isinstance(result, Rejected) and result.code == "turn_left_out"
    assert result.message == "what message 2 says is nothing but names of control tokens"


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


def test_a_generation_block_that_closes_itself_takes_nothing_of_the_next_turn(open_renderer: Open) -> None:
    source = (
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ (m.content if loop.last else m.content | upper) }}"
        "{{ '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert trained(open_renderer("llama-3", source), example(turns)) == ["B<|eot_id|>", "d<|eot_id|>"]


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
