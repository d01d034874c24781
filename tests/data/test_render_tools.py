"""Tools: trained as the template writes them, or refused with its name."""

from __future__ import annotations

import pytest

from muxtune.data.types import Example, Message
from tests.data.folders import template
from tests.data.rendering import CALL, TOOLS, TWO, Open, example, refused, trained

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
