"""What a caller in Python hands to `muxtune.Engine`, judged before it is used: the wrong kind of thing is a ConfigError
that names the argument, as in a config file, and not whatever fails first inside.

The boundary: kinds and ranges of single arguments; what they mean together is their user's business.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TypeAlias, cast

from muxtune.data.types import Message
from muxtune.engine.load import DTypeName
from muxtune.errors import ConfigError
from muxtune.models.backbone import BlockChoice
from muxtune.spec.job import JobSpec
from muxtune.spec.run import MAX_THREADS, read_block, read_device, read_dtype

Prompt: TypeAlias = str | Sequence[Message]


def as_path(value: object, where: str) -> Path:
    """Anything that names a path by text; whether there is something is not asked."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ConfigError(f"should be a path, not {_kind(value)}", where=where)
    return Path(value)


def as_job(value: object) -> JobSpec:
    """A job, and not the mapping that one is made of."""
    if not isinstance(value, JobSpec):
        raise ConfigError(
            f"should be a muxtune.Job, not {_kind(value)}",
            where="job",
            hint='such as muxtune.Job(name="sql", datasets=["sql.jsonl"])',
        )
    return value


def as_prompt(value: object) -> Prompt:
    """Text, or a conversation of one turn at least."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(one, Message) for one in value):
        return value
    raise ConfigError(
        f"should be text or a list of muxtune.Message, not {_kind(value)}",
        where="prompt",
        hint='such as [muxtune.Message("user", "How many users are there?")]',
    )


def as_requests(value: object) -> Sequence[tuple[object, object]]:
    """Pairs of a task and a prompt, neither of which is looked at."""
    if isinstance(value, Sequence) and all(isinstance(one, (tuple, list)) and len(one) == 2 for one in value):
        return value
    raise ConfigError("should be a list of pairs: a task (or None) and its prompt", where="requests")


def as_count(value: object, where: str, *, least: int = 1, most: int = 2**63 - 1) -> int:
    """A whole number from `least` to `most`."""
    if not isinstance(value, Integral):
        raise ConfigError(f"should be a whole number, not {_kind(value)}", where=where)
    whole = int(value)
    if whole < least:
        raise ConfigError(f"must be at least {least}", where=where)
    if whole > most:
        raise ConfigError(f"must be at most {most}" if most < 2**63 - 1 else "is too large", where=where)
    return whole


def as_threads(value: object, where: str = "threads") -> int:
    """A number of threads, with the bounds of a config file's."""
    return as_count(value, where, most=MAX_THREADS)


def as_number(value: object, where: str, *, most: float = math.inf) -> float:
    """From zero to `most`."""
    if not isinstance(value, Real):
        raise ConfigError(f"should be a number, not {_kind(value)}", where=where)
    number = float(value)
    if not 0 <= number <= most or not math.isfinite(number):
        raise ConfigError("must be a number from 0" + (f" to {most:g}" if math.isfinite(most) else ""), where=where)
    return number


def as_device(value: object, where: str = "device") -> str:
    """The name of a device, as a config file has it."""
    return _read(read_device, value, where)


def as_dtype(value: object) -> DTypeName:
    """The name of a dtype or its alias, as a config file has it."""
    return cast(DTypeName, _read(read_dtype, value, "dtype"))


def as_block(value: object) -> BlockChoice:
    """The name of a block, as a config file has it."""
    return cast(BlockChoice, _read(read_block, value, "block"))


def _read(read: Callable[[object], str], value: object, where: str) -> str:
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(error.message, where=where, hint=error.hint) from None


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
