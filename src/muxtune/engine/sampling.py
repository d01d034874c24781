"""Generating text tokens with any mix of adapters in one batch, through `engine.execute`.

Sequences join as slots come free and leave when they meet a stop token, so a pass always carries as many as there are.
Each request draws from a generator of its own, seeded by the request: its tokens depend on nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.engine import Engine
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem

SLOTS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `prompt_ids` with task `task`'s adapter (None: the bare backbone).

    `temperature` 0 is greedy; otherwise tokens are drawn from the smallest set whose probability reaches `top_p`.
    """

    task: str | None
    prompt_ids: Sequence[int]
    stop_ids: frozenset[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class _Running:
    request: Request
    place: int
    new_ids: list[int] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=torch.Generator)


def generate(
    engine: Engine,
    requests: Sequence[Request],
    *,
    slots: int = SLOTS,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """New token ids of each request, the stop token not included. `on_token(place, id)` hears each as it comes.

    Raises DataError for tokens or positions that the backbone does not have.
    """
    source = DecodeSource()
    name = f"decode/{id(source)}"  # whoever hears a token may generate, too
    waiting = list(enumerate(requests))[::-1]
    running: dict[int, _Running] = {}
    done: list[list[int]] = [[] for _ in requests]
    with engine.lending({name: source}):
        while waiting or running:
            while waiting and len(running) < slots:
                place, request = waiting.pop()
                running[place] = _Running(request, place)
                running[place].generator.manual_seed(request.seed)
                source.states[place] = DecodeState(list(request.prompt_ids))
            engine.execute(RoundSchedule(0, (MicroBatch(0, 0, _items(running, name, source)),)))
            for place in list(running):
                if _advance(running[place], source.states[place], on_token):
                    done[place] = running.pop(place).new_ids
                    source.finish(place)
    return done


def _items(running: dict[int, _Running], name: str, source: DecodeSource) -> tuple[WorkItem, ...]:
    by_task: dict[str | None, list[int]] = {}
    for place, sequence in running.items():
        by_task.setdefault(sequence.request.task, []).append(place)
    return tuple(
        WorkItem(task, "decode", name, tuple(source.reference(place) for place in places))
        for task, places in by_task.items()
    )


def _advance(sequence: _Running, state: DecodeState, on_token: Callable[[int, int], None] | None) -> bool:
    """Take the next token; true when the sequence is finished."""
    assert state.logits_V is not None
    request = sequence.request
    token = choose_token(state.logits_V, request, sequence.generator)
    if token in request.stop_ids:
        return True
    sequence.new_ids.append(token)
    state.ids.append(token)
    if on_token is not None:
        on_token(sequence.place, token)
    return len(sequence.new_ids) >= request.max_new_tokens


def choose_token(logits_V: Tensor, request: Request, generator: torch.Generator) -> int:
    """Greedy, or drawn at a temperature from the nucleus of probability `top_p`."""
    if request.temperature == 0:
        return int(logits_V.argmax())
    probability_V = (logits_V.double().cpu() / request.temperature).softmax(dim=0)
    ranked_V, order_V = probability_V.sort(descending=True)
    outside_V = ranked_V.cumsum(0) - ranked_V >= request.top_p
    chosen = torch.multinomial(ranked_V.masked_fill(outside_V, 0), 1, generator=generator)
    return int(order_V[chosen])
