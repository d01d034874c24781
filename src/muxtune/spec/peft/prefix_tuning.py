"""Prefix tuning's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from muxtune.errors import ConfigError
from muxtune.spec.peft.attention import flops_of_positions, widths
from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.scalars import Integer, read_flag


def _read_projection(value: object) -> object:
    if read_flag(value):
        raise ConfigError(
            "is not supported: the prefix itself is trained, not a network that makes it",
            hint="leave it out; a peft folder that was trained so is read all the same",
        )
    return False


class PrefixTuning(PeftBase):
    """Prefix tuning (Li and Liang 2021; P-tuning v2, Liu et al. 2021): in every layer, each query also sees
    `num_virtual_tokens` learned keys and values, as if they came before the sequence.

    The default learning rate was tried on SmolLM2 (docs/log.md), where a prefix needs more than 24 steps; at three
    times it it learnt faster.
    """

    default_learning_rate = 3e-2

    type: Literal["prefix_tuning"] = "prefix_tuning"
    num_virtual_tokens: Annotated[Integer, Field(ge=1, le=65536)] = 20
    prefix_projection: Annotated[Literal[False], BeforeValidator(_read_projection)] = False

    @property
    def prefix_length(self) -> int:
        return self.num_virtual_tokens

    def parameters(self, places: Iterable[Place]) -> int:
        return 2 * self.num_virtual_tokens * sum(widths(places, "k").values())

    def flops_per_token(self, places: Iterable[Place]) -> int:
        return flops_of_positions(self.num_virtual_tokens, places)
