"""Examples -> token ids and the mask of trained tokens, or a reason why not.

    conversation   the chat template's text, tokenised whole: ids equal transformers' `apply_chat_template`. Trained are
                   the characters that a turn wrote (spans.py), and tokens follow from characters by their offsets
    prompt, completion    tokenised apart; BOS before as the tokenizer has it, EOS after, once; the latter is trained
    text           BOS as the tokenizer has it, EOS after, once; all of it is trained

The mask is right or the example is refused. A token that reaches over the border of a turn is no target where it brings
only whitespace into the turn, else the example is refused. Names of special tokens in anyone's text stay text
(control.py, literal.py). A refusal's message names the template and says why, and quotes no data.

Boundary: knows tokenizers and templates, not files; the caller adds line numbers. Cost: rendering a conversation with
k trained turns renders it 2 k + 1 times, in one round trip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
import numpy.typing as npt

from muxtune.data.control import MarkedText, Span
from muxtune.data.dialogue import Dialogue, UnusableError
from muxtune.data.literal import LiteralTokenizer
from muxtune.data.sandbox import Limits
from muxtune.data.template import BUNDLED_NAMES, ChatTemplate, find_template, find_tool_template
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Example, Message
from muxtune.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "completion", "all"]
Ids = npt.NDArray[np.int32]
_VERSION = 1  # of what this module and those below it make of the same input


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """T tokens: ids int32 [T], mask bool [T], true where the token is a target; mask[0] never is."""

    ids: Ids
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rejected:
    """`code` is one of a few words for counting; `message` is for people and holds nothing of the example."""

    code: str
    message: str


class Renderer:
    """One job's way of making tokens. `close` ends its sandbox process (a later call starts another)."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        template: str | None = None,
        train_on: TrainOn | None = None,
        now: datetime,
        ignore_tools: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.train_on: TrainOn = train_on or "assistant"
        self._ignore_tools = ignore_tools
        sources = (find_template(template, tokenizer), find_tool_template(template, tokenizer))
        self._chat, self._tool_chat = (
            ChatTemplate(source, tokenizer, now=now, limits=limits) if source else None for source in sources
        )
        self._now = now
        self._literal: dict[frozenset[str], LiteralTokenizer] = {}

    @property
    def template_source(self) -> str | None:
        """The chat template that is used, as an adapter folder should carry it."""
        return self._chat.source if self._chat else None

    @property
    def end_of_turn_id(self) -> int | None:
        """The token that the template ends an assistant's turn with."""
        return self.tokenizer.token_id(self._chat.probe.end_of_turn) if self._chat else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation: the tokenizer's and the model's EOS, and the template's end of turn."""
        end = () if self.end_of_turn_id is None else (self.end_of_turn_id,)
        return tuple(dict.fromkeys((*self.tokenizer.eos_ids, *end)))

    @property
    def fingerprint(self) -> str:
        """Changes whenever the tokens or the mask of any example could."""
        chats = [chat.source if chat else None for chat in (self._chat, self._tool_chat)]
        dated = any("strftime_now" in source for source in chats if source)
        parts = [
            _VERSION,
            self.tokenizer.fingerprint,
            chats,
            self.train_on,
            self._ignore_tools,
            self._now.isoformat() if dated else None,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(self, examples: Sequence[Example]) -> list[Rendered | Rejected]:
        """One answer for each example, in order.

        Raises DataError for what is wrong with all of them: no chat template, or one that breaks a rule.
        """
        return [self._one(example) for example in examples]

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> Ids:
        """Ids of a conversation up to and with the generation prompt. Raises DataError."""
        chat = self._chat_for(bool(tools))
        dialogue = Dialogue(chat, messages, tools, ignore_tools=self._ignore_tools)
        try:
            return _array(self._encode(dialogue.prompt(), chat)[0])
        except UnusableError as fault:
            raise DataError(fault.message, where=f"template {chat.name}") from None

    def prompt_ids(self, text: str) -> Ids:
        """Ids of a bare prompt, as in `prompt_completion` data."""
        return _array([*self.tokenizer.prefix_ids, *self._encode_text(text)])

    def close(self) -> None:
        for chat in (self._chat, self._tool_chat):
            if chat is not None:
                chat.close()

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, example: Example) -> Rendered | Rejected:
        try:
            if example.messages:
                return self._conversation(example)
            prompt = [] if example.prompt is None else self._encode_text(example.prompt)
            return self._text([*self.tokenizer.prefix_ids, *prompt], example)
        except UnusableError as fault:
            return Rejected(fault.code, fault.message)

    def _text(self, before: list[int], example: Example) -> Rendered:
        """Everything after `before` is trained; a text has only BOS before it, and BOS is nobody's prediction."""
        body = self._encode_text(example.completion or "")
        end = self.tokenizer.suffix_ids or ((self.tokenizer.eos_id,) if self.tokenizer.eos_id is not None else ())
        ids = [*before, *body, *end]
        mask = np.zeros(len(ids), np.bool_)
        mask[(1 if self.train_on == "all" else max(1, len(before))) :] = True
        return Rendered(_array(ids), mask)

    def _conversation(self, example: Example) -> Rendered:
        chat = self._chat_for(bool(example.tools), example)
        turns = trained_turns(example.messages, self.train_on)
        if self.train_on != "all" and any(turns):
            chat.require_generation_prompt()
        dialogue = Dialogue(chat, example.messages, example.tools, ignore_tools=self._ignore_tools)
        everything = self.train_on == "all"
        # Of "all", only what a flag takes out needs a span.
        wanted = [turn for turn, trained in enumerate(turns) if trained != everything]
        marked, spans = dialogue.spans(wanted)
        ids, offsets = self._encode(marked, chat)
        mask = self._mask(marked.text, ids, offsets, spans, chat)
        if everything:
            mask = ~mask
        mask[:1] = False
        return Rendered(_array(ids), mask)

    def _chat_for(self, tools: bool, example: Example | None = None) -> ChatTemplate:
        chat = self._tool_chat if tools and self._tool_chat is not None else self._chat
        if chat is None:
            raise DataError(
                f"{self.tokenizer.name} has no chat template, and the data are conversations",
                where=f"{example.path}:{example.line}" if example else None,
                hint="set `chat_template: chatml`, a file, or one of: " + ", ".join(BUNDLED_NAMES),
            )
        return chat

    def _encode(self, marked: MarkedText, chat: ChatTemplate) -> tuple[list[int], list[Span]]:
        meant, forged = chat.control.meant(marked)
        if forged:
            return self._encode_literally(marked.text, meant, chat.control.names)
        return self.tokenizer.encode_with_offsets(marked.text)

    def _encode_text(self, text: str) -> list[int]:
        if any(name in text for name in self.tokenizer.special_tokens):
            return self._encode_literally(text, [], self.tokenizer.special_tokens)[0]
        return self.tokenizer.encode(text)

    def _encode_literally(
        self, text: str, control: Sequence[Span], names: frozenset[str]
    ) -> tuple[list[int], list[Span]]:
        literal = self._literal.get(names)
        if literal is None:
            literal = self._literal[names] = LiteralTokenizer(self.tokenizer, names)
        try:
            return literal.encode(text, control)
        except DataError as error:
            raise UnusableError("unencodable_text", error.message) from None

    def _mask(
        self, text: str, ids: Sequence[int], offsets: Sequence[Span], spans: Iterable[Span], chat: ChatTemplate
    ) -> npt.NDArray[np.bool_]:
        """Tokens whose characters lie in one of the spans. Cost: one pass of numpy a span."""
        starts_T, ends_T = np.array(offsets, np.int64).reshape(-1, 2).T
        mask_T = np.zeros(len(ids), np.bool_)
        for start, end in spans:
            # A token of no characters (the space that some tokenizers put before a text) goes with what follows it.
            mask_T |= (starts_T >= start) & (ends_T <= end) & (starts_T < end)
            over_T = (starts_T < end) & (ends_T > start) & ((starts_T < start) | (ends_T > end))
            for t in np.flatnonzero(over_T):
                token = (int(starts_T[t]), int(ends_T[t]))
                mask_T[t] = self._belongs(text, token, (start, end), chat)
        return mask_T

    def _belongs(self, text: str, token: Span, span: Span, chat: ChatTemplate) -> bool:
        """Whether a token that reaches over a border of the span is a target."""
        inside = text[max(token[0], span[0]) : min(token[1], span[1])]
        core = text[token[0] : token[1]].strip()
        if core in chat.added.names:  # an added token may take in the whitespace around it
            place = text.index(core, token[0])
            return span[0] <= place < span[1]
        if not inside.strip():
            return False
        raise UnusableError(
            "token_over_border",
            f"a token reaches over the start or end of a turn: template {chat.name} lets the text beside it run on",
        )


def trained_turns(messages: Sequence[Message], train_on: TrainOn) -> list[bool]:
    """Which turns are trained: as `train_on` says, but a message's own flag wins.

    "completion" means the same as "assistant" here: what the model writes.
    """
    last = max((turn for turn, message in enumerate(messages) if message.role == "assistant"), default=-1)
    chosen = [
        train_on == "all" or (message.role == "assistant" and (turn == last or train_on != "last_assistant"))
        for turn, message in enumerate(messages)
    ]
    return [default if m.train is None else m.train for default, m in zip(chosen, messages, strict=True)]


def _array(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.int32)
