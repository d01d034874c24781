"""The values that flow from data files to the engine.

    line of a file -> Example (validated, canonical shape) -> TokenSequence (ids + mask of trained tokens)

Arrays are read-only numpy; nothing here knows of torch. `index` counts the examples of a data set after validation and
`line` (1-based) with `path` says where a user finds it. A *group* is the set of sequences that stay together in one
optimizer batch: a single sequence for sft; for dpo the two of a pair, the chosen one first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Shape = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text", "preference"]


def group_size(shape: Shape) -> int:
    """Sequences of one example of this shape, which stay together."""
    return 2 if shape == "preference" else 1


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` may be empty where `tool_calls` is not; `train` None means "as train_on says"."""

    role: str
    content: str
    train: bool | None = None
    extra: Mapping[str, object] | None = None  # tool_calls, tool_call_id, name: handed to the template as they are


@dataclass(frozen=True, slots=True)
class Example:
    """One validated line in canonical form: `messages`, or `prompt` and `completion`, or `completion` alone (text).

    A preference pair is the example with the chosen response, and in `rejected` the one with the other.
    """

    path: str
    line: int
    shape: Shape
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    completion: str | None = None
    tools: tuple[Mapping[str, object], ...] = ()
    rejected: Example | None = None

    @property
    def group(self) -> tuple[Example, ...]:
        """What becomes the sequences of one group."""
        return (self,) if self.rejected is None else (self, self.rejected)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One tokenised sequence of T tokens.

    `ids` is int32 [T]; `mask` is bool [T], true where the token is a *target*: the loss of predicting ids[t] from the
    tokens before it counts. mask[0] is never true (nothing predicts the first token).
    """

    index: int
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def feed(self, digest: hashlib._Hash) -> None:
        """Put tokens and mask into a hash, their number first; the same bytes on every machine."""
        digest.update(len(self).to_bytes(8, "little"))
        digest.update(self.ids.astype("<i4").tobytes())
        digest.update(self.mask.astype("u1").tobytes())

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def input_tokens(self) -> int:
        """How many of its first tokens a model has to be given: those before the last target, which is only predicted,
        as is nothing after it. At least 1 of a sequence that has a token."""
        last = len(self) - 1 - int(self.mask[::-1].argmax()) if len(self) else 0
        return max(min(1, len(self)), last if last > 0 and self.mask[last] else 0)
