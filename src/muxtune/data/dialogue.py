"""One conversation, rendered: the text, where each trained turn is in it, and what is wrong with it.

The checks that need more than one rendering of a conversation are here: that a template does not ignore tools, tool
calls or tool results that the data have (rendered without them, the text would be the same); that names of control
tokens in the data do not change what the template writes; that each trained turn has text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from muxtune.data.control import MarkedText, Span, choose_mark, strings_of, take_out
from muxtune.data.sandbox import Ask, Conversation, TemplateFault
from muxtune.data.spans import asks_for_turn, assistant_span, has_text, marked_spans, other_span
from muxtune.data.template import ChatTemplate
from muxtune.data.types import Message

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that data and templates use for one thing
_MAIN, _UNMARKED, _FIRST_VARIANT = 0, 1, 2  # numbers of the conversations in a request

Json = Mapping[str, object]
Answers = Mapping[Ask, str | TemplateFault]


class UnusableError(Exception):
    """This conversation cannot be used; the text quotes none of it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class _Seen:
    """What came back from the sandbox, marks taken out."""

    whole: MarkedText
    answers: Answers
    blocks: tuple[Span, ...]  # {% generation %} blocks of the whole


class Dialogue:
    """Messages and tools bound to a template."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        *,
        ignore_tools: bool,
    ) -> None:
        self._template = template
        self._messages = messages
        self._ignore_tools = ignore_tools
        self._tools = tuple(tools) or None
        self._turns = [_as_json(message) for message in messages]
        strings = [*strings_of(self._turns), *strings_of(self._tools)]
        suspicious = any(template.control.needs_marks(text) for text in strings)
        self._mark = choose_mark(strings) if suspicious else None

    def prompt(self) -> MarkedText:
        """The text up to and with the generation prompt. Raises UnusableError, DataError."""
        return self._render(Ask(_MAIN, len(self._messages), True), [], []).whole

    def spans(self, turns: Sequence[int]) -> tuple[MarkedText, list[Span]]:
        """The text, and the characters of it that the given turns wrote. Raises UnusableError, DataError."""
        total = len(self._messages)
        asks = [ask for turn in turns for ask in asks_for_turn(_MAIN, turn, total, self._is_assistant(turn))]
        variants = [] if self._ignore_tools else self._without_tools()
        seen = self._render(Ask(_MAIN, total), asks, [chat for _, chat in variants])
        for number, (what, _) in enumerate(variants, start=_FIRST_VARIANT):
            if seen.answers[Ask(number, total)] == seen.whole.text:
                raise UnusableError(
                    "tools_ignored", f"{self._name} ignores the {what}; `ignore_tools: true` trains without them"
                )
        return seen.whole, self._spans(seen, turns)

    def _render(self, whole: Ask, asks: Sequence[Ask], variants: Sequence[Conversation]) -> _Seen:
        """One request to the sandbox; `whole` comes first in it, so it is the one whose blocks are recorded."""
        plain = Conversation(self._turns, self._tools)
        extra = [Ask(_UNMARKED, whole.count, whole.generation_prompt)] if self._mark else []
        extra += [Ask(_FIRST_VARIANT + k, whole.count) for k in range(len(variants))]
        unique = list(dict.fromkeys([whole, *asks, *extra]))
        renderings = self._template.render([self._marked(plain), plain, *variants], unique)
        answers = dict(zip(unique, renderings.texts, strict=True))
        text = answers[whole]
        if isinstance(text, TemplateFault):
            raise UnusableError("template_error", f"{self._name} fails on it: {text.message}")
        marked = take_out(text, self._mark)
        clean = {ask: take_out(a, self._mark).text if isinstance(a, str) else a for ask, a in answers.items()}
        if self._mark and clean[extra[0]] != marked.text:
            raise UnusableError(
                "special_token_in_text", f"{self._name} does not leave the name of a special token in a text as it is"
            )
        blocks = tuple((marked.place(start), marked.place(end)) for start, end in renderings.generation)
        return _Seen(marked, clean, blocks)

    def _marked(self, chat: Conversation) -> Conversation:
        if self._mark is None:
            return chat
        mark_all = self._template.control.mark_all
        messages = [mark_all(message, self._mark) for message in chat.messages]
        tools = None if chat.tools is None else [mark_all(tool, self._mark) for tool in chat.tools]
        return Conversation(cast(Sequence[Json], messages), cast(Sequence[Json] | None, tools))

    def _without_tools(self) -> list[tuple[str, Conversation]]:
        """The conversation less its tools, its calls, its results: whichever it has."""
        variants = []
        if self._tools:
            variants.append(("tools", Conversation(self._turns)))
        if any(turn.get("tool_calls") for turn in self._turns):
            bare = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in self._turns]
            variants.append(("tool calls", Conversation(bare, self._tools)))
        if any(turn["role"] == "tool" and turn["content"] for turn in self._turns):
            mute = [turn | {"content": ""} if turn["role"] == "tool" else turn for turn in self._turns]
            variants.append(("tool results", Conversation(mute, self._tools)))
        return variants

    def _spans(self, seen: _Seen, turns: Sequence[int]) -> list[Span]:
        """From prefixes; where they cannot tell one answer, from `{% generation %}` blocks for all answers."""
        total, added = len(self._messages), self._template.added
        found = {
            turn: (assistant_span if self._is_assistant(turn) else other_span)(seen.answers, _MAIN, total, turn, added)
            for turn in turns
        }
        if any(found[turn] is None for turn in turns if self._is_assistant(turn)):
            assistants = [turn for turn in range(total) if self._is_assistant(turn)]
            supplied = self._template.probe.generation_prompt
            blocks = marked_spans(seen.whole.text, seen.blocks, assistants, supplied, added) or {}
            found |= {turn: span for turn, span in blocks.items() if turn in found}
        return [self._checked(seen, turn, found[turn]) for turn in turns]

    def _checked(self, seen: _Seen, turn: int, span: Span | None) -> Span:
        if span is None:
            raise self._refusal(seen, turn)
        text = seen.whole.text[span[0] : span[1]]
        if self._messages[turn].content.strip() and not has_text(text, self._template.added):
            said = f"what message {turn + 1} says"
            if not has_text(self._messages[turn].content, self._template.added):
                raise UnusableError("turn_left_out", f"{said} is nothing but names of control tokens")
            raise UnusableError("turn_left_out", f"{self._name} leaves out {said}")
        return span

    def _refusal(self, seen: _Seen, turn: int) -> UnusableError:
        for ask in asks_for_turn(_MAIN, turn, len(self._messages), self._is_assistant(turn)):
            answer = seen.answers[ask]
            if isinstance(answer, TemplateFault):
                before = f"the first {ask.count} messages" if ask.count else "a conversation that the assistant opens"
                return UnusableError("template_error", f"{self._name} fails on {before}: {answer.message}")
        return UnusableError(
            "template_not_prefix",
            f"{self._name} writes message {turn + 1}, or those before it, in another way when others follow, so it "
            "cannot be told what is trained; try `train_on: last_assistant`, or {% generation %} in the template",
        )

    def _is_assistant(self, turn: int) -> bool:
        return self._messages[turn].role == "assistant"

    @property
    def _name(self) -> str:
        return f"template {self._template.name}"


def _as_json(message: Message) -> dict[str, object]:
    """A message as templates expect it; what the model thought goes by every name in use for it."""
    value: dict[str, object] = {"role": message.role, "content": message.content, **(message.extra or {})}
    thought = next((value[name] for name in _REASONING if value.get(name) is not None), None)
    return value if thought is None else {"thinking": thought, **value, "reasoning_content": thought}
