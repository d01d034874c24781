"""Seconds spent inside named functions while a program runs as it is: they are wrapped, and put back afterwards.

What is wrapped must not call what else is wrapped, or its seconds count twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from muxtune.engine import executor
from muxtune.engine.optim import FlatAdamW
from muxtune.models.backbone import Backbone
from muxtune.peft.parameters import FlatParameters

Places = Sequence[tuple[Any, str]]  # owner and name of a function


def work_of(backbone: Backbone) -> Places:
    """What a step is for: backbone, head, backward pass and optimizers."""
    return (
        (backbone, "hidden"),
        (executor, "token_losses"),
        (torch.autograd, "backward"),
        (FlatAdamW, "step"),
        (FlatAdamW, "gradient_norm"),
        (FlatParameters, "zero_gradient"),
    )


@contextmanager
def timed(sections: Mapping[str, Places]) -> Iterator[dict[str, float]]:
    """Seconds of each section's functions together, while the block lasts."""
    seconds = dict.fromkeys(sections, 0.0)
    kept = [(owner, name, owner.__dict__.get(name)) for places in sections.values() for owner, name in places]
    for section, places in sections.items():
        for owner, name in places:
            setattr(owner, name, _timing(getattr(owner, name), section, seconds))
    try:
        yield seconds
    finally:
        for owner, name, function in kept:
            if function is None:
                delattr(owner, name)  # it was the class's
            else:
                setattr(owner, name, function)


def _timing(function: Callable[..., Any], section: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[section] += time.perf_counter() - began

    return run
