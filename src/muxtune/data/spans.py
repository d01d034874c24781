"""Which characters of a rendered conversation each turn wrote: the incremental-prefix method.

Turn i begins where the rendering of the turns before it, generation prompt included, ends; and it ends where the
rendering of the turns up to it ends. Both must be a prefix of the whole rendering, else a span would be a guess, and
the answer is None. Two things are allowed for: what a template writes only at the very end of a conversation (Phi-3's
`<|endoftext|>`) belongs to no turn, and whitespace after an end-of-turn token is the template's, no answer's.

Where that fails, `{% generation %}` blocks, if the template has one for each assistant turn, say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muxtune.data.control import Span, TokenNames, common_length
from muxtune.data.sandbox import Ask, TemplateFault

Answers = Mapping[Ask, str | TemplateFault]


def asks_for_turn(chat: int, turn: int, total: int, assistant: bool) -> list[Ask]:
    """What `assistant_span` or `other_span` needs rendered, beside the whole."""
    before = Ask(chat, turn, True) if assistant else Ask(chat, turn)
    last = [Ask(chat, total, True)] if turn == total - 1 else []
    return [before, Ask(chat, turn + 1), *last]


def assistant_span(answers: Answers, chat: int, total: int, turn: int, added: TokenNames) -> Span | None:
    """Characters of assistant turn number `turn`, with its end-of-turn token; None where they cannot be told."""
    whole, before = answers[Ask(chat, total)], answers[Ask(chat, turn, True)]
    if not isinstance(whole, str) or not isinstance(before, str) or not whole.startswith(before):
        return None
    start = len(before)
    end = _end_of(answers, chat, total, turn, added)
    if end is None or end < start:
        return None
    return start, _trim(whole, start, end, added, last=turn == total - 1)


def other_span(answers: Answers, chat: int, total: int, turn: int, added: TokenNames) -> Span | None:
    """Characters of a turn that is not the assistant's, its header and all."""
    whole = answers[Ask(chat, total)]
    start = 0 if turn == 0 else _end_of(answers, chat, total, turn - 1, added)
    end = _end_of(answers, chat, total, turn, added)
    if not isinstance(whole, str) or start is None or end is None or end < start:
        return None
    return start, _trim(whole, start, end, added, last=turn == total - 1)


def marked_spans(
    whole: str, blocks: Sequence[Span], assistants: Sequence[int], generation_prompt: str, added: TokenNames
) -> dict[int, Span] | None:
    """Spans of the assistant turns from `{% generation %}` blocks; None where they are not one a turn."""
    if len(blocks) != len(assistants):
        return None
    spans: dict[int, Span] = {}
    for turn, (start, end) in zip(assistants, blocks, strict=True):
        for place in range(max(0, start - len(generation_prompt)), start + 1):
            if generation_prompt and whole.startswith(generation_prompt, place):
                start = max(start, place + len(generation_prompt))
                break
        spans[turn] = (start, max(start, _closed(whole, start, end, added)))
    return spans


def _closed(whole: str, start: int, end: int, added: TokenNames) -> int:
    """A block's end: behind its last token if that closes it, else behind the token that follows it at once."""
    trimmed = _trim(whole, start, end, added, last=False)
    if any(stop == trimmed for _, stop in added.find(whole)):
        return trimmed
    return next((stop for place, stop in added.find(whole) if place == end), trimmed)


def _end_of(answers: Answers, chat: int, total: int, turn: int, added: TokenNames) -> int | None:
    """Where turn number `turn` ends in the whole; None where that rendering goes on with other text."""
    whole, after = answers[Ask(chat, total)], answers[Ask(chat, turn + 1)]
    if not isinstance(whole, str) or not isinstance(after, str):
        return None
    end = _shared(whole, after, added)
    if has_text(after[end:], added):
        return None
    if turn == total - 1:
        continued = answers.get(Ask(chat, total, True))
        if isinstance(continued, str) and not has_text(whole[_shared(whole, continued, added) :], added):
            return _shared(whole, continued, added)
    return end


def _shared(one: str, other: str, added: TokenNames) -> int:
    """Length of the common prefix, cut back so that it ends inside no added token of either text."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    length = common_length(one, other)
    for text in (one, other):
        length = next((start for start, end in added.find(text) if start < length < end), length)
    return length


def has_text(text: str, added: TokenNames) -> bool:
    """Whether there is more than added tokens and whitespace."""
    place = 0
    for start, end in added.find(text):
        if text[place:start].strip():
            return True
        place = end
    return bool(text[place:].strip())


def _trim(whole: str, start: int, end: int, added: TokenNames, *, last: bool) -> int:
    """Where a turn's targets end: after its end-of-turn token where there is one, else after its last character."""
    tokens = [span for span in added.find(whole) if span[0] >= start]
    inside = [span for span in tokens if span[1] <= end]
    if inside and not whole[inside[-1][1] : end].strip():
        return inside[-1][1]
    following = tokens[len(inside)] if last and len(tokens) > len(inside) else None
    # A template may write its only closing token once, at the end of the conversation.
    return following[1] if following and not whole[end : following[0]].strip() else end
