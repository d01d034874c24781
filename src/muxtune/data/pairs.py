"""Preference pairs: one prompt with a chosen and a rejected response.

    {"prompt", "chosen", "rejected"}            each a string, or turns as in `messages`; also `messages` for `prompt`
    {"input": {"messages", "tools"?}, "preferred_output": [turn], "non_preferred_output": [turn]}       OpenAI's

Where all three are strings the pair is of bare texts, as `prompt_completion`. Where any of them is turns it is a
conversation: a prompt that is a string is what the user says, a response that is one is what the assistant answers.

Boundary: structure only. Nothing of the prompt is a target, and of a response each assistant's turn that says
something, whatever `weight` they carry: what a pair compares is not for a flag to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muxtune.data.fields import Json, mapping, string, tool_definitions, wrong_type
from muxtune.data.problems import LineError
from muxtune.data.turns import from_messages, openai_turns
from muxtune.data.types import Message

Turns = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """All strings, or all turns."""

    prompt: Turns | str
    chosen: Turns | str
    rejected: Turns | str
    tools: tuple[Mapping[str, object], ...] = ()


def from_pair(line: Json, prompt_key: str) -> Pair:
    """`{prompt_key, "chosen", "rejected", "tools"?}`. Raises LineError."""
    tools = tool_definitions(line)
    if all(isinstance(line[key], str) for key in (prompt_key, "chosen", "rejected")) and prompt_key == "prompt":
        if tools:
            raise LineError("bad_tools", "`tools` belong to a conversation; write `prompt` as turns")
        return Pair(string(line, "prompt"), string(line, "chosen"), string(line, "rejected"))
    return Pair(_prompt(line, prompt_key), _response(line, "chosen"), _response(line, "rejected"), tools)


def from_openai_pair(line: Json, input_key: str, preferred_key: str, other_key: str) -> Pair:
    """OpenAI's, in either spelling of its keys; each response is one assistant's turn. Raises LineError."""
    held = mapping(line[input_key], input_key)
    prompt = _context(openai_turns(held, "messages", f"{input_key}."))
    chosen, rejected = _response(line, preferred_key), _response(line, other_key)
    for key, response in ((preferred_key, chosen), (other_key, rejected)):
        if len(response) != 1:
            raise LineError("bad_response", f"field `{key}` has {len(response)} turns; it is one assistant's turn")
    return Pair(prompt, chosen, rejected, tool_definitions(held))


def _prompt(line: Json, key: str) -> Turns:
    if key == "messages":
        return _context(from_messages(line))
    if isinstance(line[key], str):
        return (Message("user", string(line, key), train=False),)
    if not isinstance(line[key], list):
        raise wrong_type(key, "string or array of turns", line[key])
    return _context(openai_turns(line, key))


def _context(turns: Turns) -> Turns:
    return tuple(replace(turn, train=False) for turn in turns)


def _response(line: Json, key: str) -> Turns:
    """Turns of the assistant and of its tools, the assistant's first and last."""
    value = line[key]
    if isinstance(value, str):
        return (Message("assistant", value, train=bool(value)),)
    if not isinstance(value, list):
        raise wrong_type(key, "string or array of turns", value)
    turns = openai_turns(line, key)
    for number, turn in enumerate(turns):
        ends = number in (0, len(turns) - 1)
        if turn.role != "assistant" and (ends or turn.role != "tool"):
            hint = "; what comes before the response belongs to the prompt" if turn.role in ("user", "system") else ""
            raise LineError("bad_response", f"`{key}[{number}]` is the {turn.role}'s turn, not the assistant's{hint}")
    return tuple(_judged(turn) for turn in turns)


def _judged(turn: Message) -> Message:
    """An assistant's turn that says something is trained."""
    calls = bool(turn.extra and turn.extra.get("tool_calls"))
    return replace(turn, train=turn.role == "assistant" and (bool(turn.content) or calls))
