"""Prompt tuning's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from muxtune.errors import ConfigError
from muxtune.spec.peft.attention import flops_of_positions
from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.scalars import Integer, clip


def _read_init(value: object) -> object:
    name = value.upper() if isinstance(value, str) else value
    if name in ("TEXT", "SAMPLE_VOCAB"):
        raise ConfigError(f"{clip(value)} is not supported yet", hint="supported: RANDOM")
    if name != "RANDOM":
        raise ConfigError(f"should be RANDOM, got {clip(value)}")
    return name


class PromptTuning(PeftBase):
    """Prompt tuning (Lester et al. 2021): `num_virtual_tokens` learned embeddings before each sequence.

    The default learning rate was tried on SmolLM2 (docs/log.md), where a prompt needs far more than 24 steps at any.
    """

    default_learning_rate = 3e-2

    type: Literal["prompt_tuning"] = "prompt_tuning"
    num_virtual_tokens: Annotated[Integer, Field(ge=1, le=65536)] = 20
    prompt_tuning_init: Annotated[Literal["RANDOM"], BeforeValidator(_read_init)] = "RANDOM"

    @property
    def virtual_rows(self) -> int:
        return self.num_virtual_tokens

    def parameters(self, places: Iterable[Place]) -> int:
        return self.num_virtual_tokens * sum(place.outputs for place in places if place.kind == "embedding")

    def flops_per_token(self, places: Iterable[Place]) -> int:
        # A token also attends to the virtual rows, whose own way through the backbone `virtual_rows` tells of.
        return flops_of_positions(self.num_virtual_tokens, places)
