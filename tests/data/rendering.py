"""Short ways to render an example and look at what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from muxtune.data.render import Rejected, Rendered, Renderer
from muxtune.data.types import Example, Message

NOW = datetime(2026, 3, 9)
Turns = Sequence[tuple[str, str]]
TWO: Turns = [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)

Open = Callable[..., Renderer]


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
