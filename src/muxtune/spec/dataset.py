"""What a job reads: its data sets and its validation set.

Paths stand as the opener needs them: the YAML loader joins them to the config file's folder, a Python user gives them
relative to the working directory. Shapes are config.md's; None means that the reader detects it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.border import Spec
from muxtune.spec.scalars import Integer, Number, PathText, choice

_SHAPE_ALIASES = {"chat_template": "messages", "openai": "messages", "input_output": "prompt_completion"}
_read_shape_name = choice(
    "messages", "prompt_completion", "alpaca", "sharegpt", "text", "preference", aliases=_SHAPE_ALIASES
)


def _read_shape(value: object) -> str:
    if isinstance(value, str) and value.lower() == "completion":
        raise ConfigError(
            "'completion' means different things to different tools",
            hint="say prompt_completion (a prompt and its completion) or text (train on all of it)",
        )
    return _read_shape_name(value)


DatasetType = Annotated[
    Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text", "preference"], BeforeValidator(_read_shape)
]


class _DataFile(Spec):
    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, data: object) -> object:
        return {"path": data} if isinstance(data, str) else data


MAX_WEIGHT = 1000  # copies are held in memory; what is to be seen longer has max_steps


class Dataset(_DataFile):
    """One file of examples. `weight` scales how often each of its examples is seen in an epoch."""

    path: PathText
    type: DatasetType | None = None
    weight: Annotated[Number, Field(gt=0, le=MAX_WEIGHT)] = 1


class Validation(_DataFile):
    """Held-out examples, evaluated every `eval_steps` optimizer steps (None: as the job's `eval_steps` says)."""

    path: PathText
    type: DatasetType | None = None
    eval_steps: Annotated[Integer, Field(ge=1)] | None = None
