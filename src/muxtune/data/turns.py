"""Chat turns of a line -> `Message`s: OpenAI's `messages`, ShareGPT's `conversations`, Alpaca's columns.

Boundary: structure only. Whether a template accepts the order of the turns is the renderer's question. An assistant
turn that says nothing (no text, no tool call) is context, never a target, unless its `weight` is 1.
"""

from __future__ import annotations

from muxtune.data.fields import Json, array, mapping, optional_string, string, wrong_type
from muxtune.data.problems import LineError, quoted
from muxtune.data.strict_json import parse
from muxtune.data.types import Message

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def from_messages(line: Json) -> tuple[Message, ...]:
    """OpenAI's chat format: `{"messages": [{"role", "content", "weight"?, "tool_calls"?, ...}]}`."""
    if "functions" in line and line["functions"] is not None:
        raise LineError("bad_tools", "field `functions` is an older form that templates ignore; write `tools`")
    return openai_turns(line, "messages")


def openai_turns(holder: Json, name: str, place: str = "") -> tuple[Message, ...]:
    """The turns in field `name` of `holder`, which `place` leads to (`input.`)."""
    return tuple(
        _openai_turn(mapping(turn, f"{place}{name}[{number}]"), f"{place}{name}[{number}].")
        for number, turn in enumerate(_turns(holder, name, place))
    )


def from_sharegpt(line: Json) -> tuple[Message, ...]:
    """`{"conversations": [{"from", "value"}], "system"?}`."""
    turns = [
        _sharegpt_turn(mapping(turn, f"conversations[{number}]"), f"conversations[{number}].")
        for number, turn in enumerate(_turns(line, "conversations"))
    ]
    return (*_system(line), *turns)


def from_alpaca(line: Json) -> tuple[Message, ...]:
    """`{"instruction", "input"?, "output", "system"?, "history"?}`; the user says instruction, newline, input."""
    past: list[Message] = []
    history = array(line, "history") if line.get("history") is not None else []
    for number, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise LineError("wrong_type", f"field `history[{number}]`: expected a pair of strings")
        past += [Message("user", pair[0]), _assistant(pair[1])]
    extra_input = optional_string(line, "input")
    instruction = string(line, "instruction")
    question = f"{instruction}\n{extra_input}" if extra_input else instruction
    return (*_system(line), *past, Message("user", question), _assistant(string(line, "output")))


def _turns(line: Json, name: str, place: str = "") -> list[object]:
    turns = array(line, name, place)
    if not turns:
        raise LineError("empty_messages", f"field `{place}{name}` is empty")
    return turns


def _system(line: Json) -> tuple[Message, ...]:
    text = optional_string(line, "system")
    return (Message("system", text),) if text else ()


def _assistant(text: str) -> Message:
    return Message("assistant", text, train=None if text else False)


def _openai_turn(turn: Json, place: str) -> Message:
    role = string(turn, "role", place)
    if role not in ROLES:
        raise LineError("unknown_role", f"`{place}role` is {quoted(role)}; {_role_hint(role)}")
    calls = _tool_calls(turn, place)
    if calls and role != "assistant":
        raise LineError("bad_tools", f"`{place}tool_calls` belongs to an assistant's turn")
    if turn.get("function_call") is not None:
        raise LineError("bad_tools", f"`{place}function_call` is an older form; write `tool_calls`")
    for name in ("tool_call_id", "name", "reasoning_content"):
        optional_string(turn, name, place)
    content = _content(turn, place, may_be_null=bool(calls))
    extra = {
        key: value
        for key, value in turn.items()
        if key not in ("role", "content", "weight") and value is not None and value != []
    }
    empty = role == "assistant" and not content and not calls
    return Message(role, content, train=_weight(turn, role, place, empty), extra=extra or None)


def _role_hint(role: str) -> str:
    if role in SHAREGPT_ROLES:
        return "roles are system, user, assistant, tool (`human` and `gpt` belong to the `sharegpt` shape)"
    if role == "developer":
        return "write `system`: chat templates do not know it"
    return "roles are system, user, assistant, tool"


def _content(turn: Json, place: str, *, may_be_null: bool) -> str:
    """A string, or OpenAI's list of text parts, which are joined; images and sound are refused."""
    value = turn.get("content")
    if value is None and (may_be_null or "content" not in turn):
        if may_be_null:
            return ""
        raise LineError("missing_field", f"field `{place}content` is missing")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(f"{place}content", "string", value)
    parts = []
    for number, part in enumerate(value):
        holder = mapping(part, f"{place}content[{number}]")
        if holder.get("type") != "text":
            raise LineError("bad_content", f"`{place}content[{number}]` is not a part of type `text`")
        parts.append(string(holder, "text", f"{place}content[{number}]."))
    return "".join(parts)


def _tool_calls(turn: Json, place: str) -> list[object]:
    if turn.get("tool_calls") is None:
        return []
    calls = array(turn, "tool_calls", place)
    for number, call in enumerate(calls):
        where = f"{place}tool_calls[{number}]"
        function = mapping(mapping(call, where).get("function"), f"{where}.function")
        string(function, "name", f"{where}.function.")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict):
            raise wrong_type(f"{where}.function.arguments", "string or object", arguments)
    return calls


def _weight(turn: Json, role: str, place: str, empty: bool) -> bool | None:
    """OpenAI's `weight`: 0 keeps an assistant's turn as context, 1 trains it."""
    value = turn.get("weight")
    if value is None:
        return False if empty else None
    if isinstance(value, bool) or value not in (0, 1):
        raise LineError("bad_weight", f"`{place}weight` is 0 or 1")
    if value == 1 and role != "assistant":
        raise LineError("bad_weight", f"`{place}weight` 1 belongs to an assistant's turn; see `train_on` for others")
    return value == 1


def _sharegpt_turn(turn: Json, place: str) -> Message:
    if "from" not in turn and "role" in turn:
        raise LineError("missing_field", f"field `{place}from` is missing; role/content turns belong in `messages`")
    speaker = string(turn, "from", place)
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise LineError("unknown_role", f"`{place}from` is {quoted(speaker)}; speakers are {known}")
    role, text = SHAREGPT_ROLES[speaker], string(turn, "value", place)
    if speaker == "function_call":
        calls = _called_functions(text, place)
        return Message(role, "", train=_weight(turn, role, place, empty=False), extra={"tool_calls": calls})
    empty = role == "assistant" and not text
    return Message(role, text, train=_weight(turn, role, place, empty))


def _called_functions(text: str, place: str) -> list[Json]:
    """A `function_call` turn holds JSON in a string: {"name", "arguments"}, or a list of them."""
    value = parse(text)
    calls: list[Json] = []
    for call in value if isinstance(value, list) else [value]:
        function = mapping(call, f"{place}value")
        string(function, "name", f"{place}value.")
        if not isinstance(function.get("arguments"), str | dict):
            raise wrong_type(f"{place}value.arguments", "string or object", function.get("arguments"))
        calls.append({"type": "function", "function": dict(function)})
    if not calls:
        raise LineError("bad_tools", f"`{place}value` calls no function")
    return calls
