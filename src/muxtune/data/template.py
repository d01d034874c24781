"""Chat templates: where they come from, and what is known of one before any example is rendered.

    None           the model's own (with its "tool_use" variant for examples that have tools)
    a bundled name `chatml`, or `plain`, which needs no special token but EOS
    else           a file of the user's (or, from a program, the template's text itself)

`ChatTemplate` renders one short conversation of its own first, the *probe*, to learn the template's generation prompt,
its end-of-turn token and its control tokens, and to refuse a template that has no generation prompt but needs one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from muxtune.data.control import TokenNames
from muxtune.data.sandbox import Ask, Conversation, Limits, Renderings, Sandbox
from muxtune.data.spans import assistant_span
from muxtune.data.tokenizer import TextTokenizer
from muxtune.errors import DataError

_BUNDLED = Path(__file__).with_name("templates")
BUNDLED_NAMES = tuple(sorted(file.stem for file in _BUNDLED.glob("*.jinja")))
_MAX_TEMPLATE_BYTES = 2**20
_QUESTION, _ANSWER = "Probequestion", "Probeanswer"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """`name` is how messages call it."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe showed. All parts are empty where the template refused it (some demand a system message)."""

    generation_prompt: str = ""
    end_of_turn: str | None = None
    missing_header: str = ""  # what comes before an answer and no generation prompt supplies


class ChatTemplate:
    """One template bound to one tokenizer."""

    def __init__(
        self, source: TemplateSource, tokenizer: TextTokenizer, *, now: datetime, limits: Limits | None = None
    ) -> None:
        self.name = source.name
        self.source = source.source
        self.variables: Mapping[str, str] = tokenizer.special_names
        self.added = TokenNames(tokenizer.added_tokens)
        self._special = tokenizer.special_tokens
        self._sandbox = Sandbox(source.source, name=source.name, now=now, limits=limits)

    def render(self, conversations: Sequence[Conversation], asks: Sequence[Ask]) -> Renderings:
        """Raises DataError where the template itself cannot be used."""
        return self._sandbox.render(conversations, asks, self.variables)

    def close(self) -> None:
        self._sandbox.close()

    @cached_property
    def probe(self) -> Probe:
        chat = Conversation([{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}])
        asks = [Ask(0, 2), Ask(0, 1), Ask(0, 1, True), Ask(0, 2, True)]
        answers = dict(zip(asks, self.render([chat], asks).texts, strict=True))
        whole, asked, prompted = answers[asks[0]], answers[asks[1]], answers[asks[2]]
        if not isinstance(whole, str) or not isinstance(prompted, str):
            return Probe()
        span = assistant_span(answers, 0, 2, 1, self.added)
        if span is None:
            return Probe()
        start, end = span
        supplied = prompted[len(asked) :] if isinstance(asked, str) and prompted.startswith(asked) else ""
        header = whole[start : max(start, whole.find(_ANSWER, start))].strip()
        return Probe(
            generation_prompt=supplied,
            end_of_turn=next((whole[a:b] for a, b in self.added.find(whole) if b == end), None),
            missing_header="" if supplied else header,
        )

    @cached_property
    def control(self) -> TokenNames:
        """Special tokens, and what else delimits turns here: users' text never becomes one of these."""
        delimiters = set() if self.probe.end_of_turn is None else {self.probe.end_of_turn}
        chat = Conversation([{"role": "user", "content": _QUESTION}])
        (text,) = self.render([chat], [Ask(0, 1)]).texts
        if isinstance(text, str):
            delimiters |= {text[start:end] for start, end in self.added.find(text)}
        return TokenNames(self._special | delimiters)

    def require_generation_prompt(self) -> None:
        """Without one, the header of an answer would be taken for the answer."""
        if self.probe.missing_header:
            raise DataError(
                "the chat template ignores add_generation_prompt, so the start of an answer cannot be told",
                where=f"template {self.name}",
                hint="end the template with {% if add_generation_prompt %} and the text that comes before an answer",
            )


def find_template(value: str | None, tokenizer: TextTokenizer) -> TemplateSource | None:
    """The template for conversations; None where the model has none and none was named."""
    if value is None:
        own = tokenizer.chat_template
        return None if own is None else TemplateSource(f"of {tokenizer.name}", own)
    if value in BUNDLED_NAMES:
        return TemplateSource(value, _bundled(value, tokenizer))
    if "{{" in value or "{%" in value:
        return TemplateSource("given as text", value)
    return TemplateSource(value, _from_file(Path(value)))


def find_tool_template(value: str | None, tokenizer: TextTokenizer) -> TemplateSource | None:
    """The model's variant for examples with tools, where it has one and no template was named."""
    own = tokenizer.templates.get("tool_use") if value is None else None
    return None if own is None else TemplateSource(f"tool_use of {tokenizer.name}", own)


def _bundled(name: str, tokenizer: TextTokenizer) -> str:
    source = (_BUNDLED / f"{name}.jinja").read_text(encoding="utf-8")
    if "<|im_end|>" not in tokenizer.added_tokens and tokenizer.eos_token is not None:
        # An end mark of several ordinary tokens stops no generation; EOS does.
        source = source.replace("'<|im_end|>'", "eos_token")
    return source


def _from_file(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise DataError(f"the chat template is larger than {_MAX_TEMPLATE_BYTES:,} bytes", where=str(file))
        return file.read_text(encoding="utf-8")
    except OSError:
        names = ", ".join(BUNDLED_NAMES)
        raise DataError(
            "there is no such chat template", where=str(file), hint=f"a file, or a bundled name: {names}"
        ) from None
    except UnicodeDecodeError:
        raise DataError("the chat template is not UTF-8", where=str(file)) from None
