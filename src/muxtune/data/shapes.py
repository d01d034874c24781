"""The shapes a line may have, and how each becomes an `Example`.

    messages            {"messages": [{"role", "content"}, ...], "tools"?}        (also named chat_template, openai)
    sharegpt            {"conversations": [{"from", "value"}, ...], "system"?, "tools"?}
    alpaca              {"instruction", "input"?, "output", "system"?, "history"?}   -> messages
    prompt_completion   {"prompt", "completion"} or {"input", "output"}            (also named input_output)
    text                {"text"}
    preference          {"prompt" or "messages", "chosen", "rejected"}, or OpenAI's {"input", "preferred_output",
                        "non_preferred_output"}    (pairs.py)

A file has one layout. The first line that fits one decides it, and a later line of another is an error with its line,
not a second guess. Keys beyond a layout's own (ids, sources) are ignored; two layouts in one line are refused, except
that `text` yields to every other, input/output to alpaca (the public alpaca file carries all of these columns), and
`messages` to a pair beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from muxtune.data.fields import Json, string, tool_definitions
from muxtune.data.pairs import Pair, from_openai_pair, from_pair
from muxtune.data.problems import LineError, quoted
from muxtune.data.turns import from_alpaca, from_messages, from_sharegpt
from muxtune.data.types import Example, Message, Shape
from muxtune.errors import ConfigError

ALIASES: dict[str, Shape] = {
    "messages": "messages",
    "chat_template": "messages",
    "openai": "messages",
    "prompt_completion": "prompt_completion",
    "input_output": "prompt_completion",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "text": "text",
    "preference": "preference",
}


def resolve_type(name: str | None) -> Shape | None:
    """The shape that `type: name` asks for; None leaves it to detection. Raises ConfigError."""
    if name is None:
        return None
    if name == "completion":
        raise ConfigError(
            "type `completion` means different things to different tools",
            where="type",
            hint="write `text` to train on whole documents, or `prompt_completion` to train on answers to prompts",
        )
    if name not in ALIASES:
        raise ConfigError(f"unknown data type {quoted(name)}", where="type", hint=f"known types: {', '.join(ALIASES)}")
    return ALIASES[name]


@dataclass(frozen=True, slots=True)
class Layout:
    """A shape with the keys that a line must have; `yields_to` names keys whose presence rules the layout out."""

    shape: Shape
    keys: tuple[str, ...]
    yields_to: tuple[str, ...] = ()

    def fits(self, line: Json) -> bool:
        return all(key in line for key in self.keys) and not any(key in line for key in self.yields_to)

    def __str__(self) -> str:
        return f"{self.shape} ({', '.join(self.keys)})"


LAYOUTS = (
    Layout("messages", ("messages",), yields_to=("chosen", "rejected")),
    Layout("sharegpt", ("conversations",)),
    Layout("alpaca", ("instruction", "output")),
    Layout("prompt_completion", ("prompt", "completion")),
    Layout("prompt_completion", ("input", "output"), yields_to=("instruction",)),
    Layout("text", ("text",), yields_to=("messages", "conversations", "instruction", "prompt", "output")),
    Layout("preference", ("prompt", "chosen", "rejected")),
    Layout("preference", ("messages", "chosen", "rejected"), yields_to=("prompt",)),
    Layout("preference", ("input", "preferred_output", "non_preferred_output")),
    Layout("preference", ("input", "preferred_completion", "non_preferred_completion")),
)


def detect(line: Json, declared: Shape | None) -> Layout:
    """The one layout that `line` fits (of the declared shape, where one is). Raises LineError."""
    if declared is not None:
        layouts = [layout for layout in LAYOUTS if layout.shape == declared]
        named = next((layout for layout in layouts if all(key in line for key in layout.keys)), None)
        if named is None:
            raise _does_not_fit(line, layouts[0])
        return named
    fitting = [layout for layout in LAYOUTS if layout.fits(line)]
    if len(fitting) > 1:
        both = " and ".join(str(layout) for layout in fitting)
        raise LineError("ambiguous_shape", f"the line fits {both}; say which with `type:`")
    if not fitting:
        raise LineError("unknown_shape", _unknown_shape(line))
    return fitting[0]


def to_example(line: Json, layout: Layout, declared: Shape | None, path: str, number: int) -> Example:
    """`line` as the Example its file's layout says. Raises LineError.

    Where the shape was detected, a line must fit this layout and no other; where it was declared, its keys suffice.
    """
    has_keys = all(key in line for key in layout.keys)
    if not has_keys or (declared is None and [other for other in LAYOUTS if other.fits(line)] != [layout]):
        raise _does_not_fit(line, layout)
    return _CONVERT[layout.shape](line, layout, path, number)


def teaches(example: Example) -> bool:
    """Whether any part of the example - of each half, of a pair - can be a target under the default `train_on`."""
    if example.rejected is not None:
        return _has_target(example) and teaches(example.rejected)
    return _has_target(example)


def _has_target(example: Example) -> bool:
    if not example.messages:
        return bool(example.completion)
    return any(_taught(message) for message in example.messages)


def _taught(message: Message) -> bool:
    return message.role == "assistant" and message.train is not False


def _does_not_fit(line: Json, layout: Layout) -> LineError:
    others = [other for other in LAYOUTS if other.fits(line) and other != layout]
    if others:
        return LineError("other_shape", f"the line is {others[0]}, the file is {layout}")
    missing = next(key for key in layout.keys if key not in line)
    return LineError("missing_field", f"field `{missing}` is missing, the file is {layout}")


def _unknown_shape(line: Json) -> str:
    if "chosen" in line or "rejected" in line:
        return "a preference pair is `prompt` (or `messages`), `chosen` and `rejected`; not all are there"
    found = ", ".join(quoted(key) for key in list(line)[:8]) or "none"
    return f"keys {found} fit no known shape: {'; '.join(str(layout) for layout in LAYOUTS)}"


def _chat(turns: Callable[[Json], tuple[Message, ...]]) -> Callable[[Json, Layout, str, int], Example]:
    def convert(line: Json, layout: Layout, path: str, number: int) -> Example:
        return Example(path, number, layout.shape, messages=turns(line), tools=tool_definitions(line))

    return convert


def _prompt_completion(line: Json, layout: Layout, path: str, number: int) -> Example:
    prompt, completion = (_plain(line, key) for key in layout.keys)
    return Example(path, number, layout.shape, prompt=prompt, completion=completion)


def _plain(line: Json, key: str) -> str:
    if isinstance(line[key], list):
        raise LineError("wrong_type", f"field `{key}`: expected string, got array; write turns as `messages`")
    return string(line, key)


def _text(line: Json, layout: Layout, path: str, number: int) -> Example:
    return Example(path, number, layout.shape, completion=string(line, "text"))


def _preference(line: Json, layout: Layout, path: str, number: int) -> Example:
    pair = from_openai_pair(line, *layout.keys) if layout.keys[0] == "input" else from_pair(line, layout.keys[0])
    return _pair_example(pair, path, number)


def _pair_example(pair: Pair, path: str, number: int) -> Example:
    def half(response: tuple[Message, ...] | str) -> Example:
        if isinstance(response, str):
            assert isinstance(pair.prompt, str)
            return Example(path, number, "preference", prompt=pair.prompt, completion=response)
        assert not isinstance(pair.prompt, str)
        return Example(path, number, "preference", messages=(*pair.prompt, *response), tools=pair.tools)

    return replace(half(pair.chosen), rejected=half(pair.rejected))


_CONVERT: dict[Shape, Callable[[Json, Layout, str, int], Example]] = {
    "messages": _chat(from_messages),
    "sharegpt": _chat(from_sharegpt),
    "alpaca": _chat(from_alpaca),
    "prompt_completion": _prompt_completion,
    "text": _text,
    "preference": _preference,
}
