"""Decoding from a cache, with sequences of many tasks in a batch, equals computing everything again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.engine import Engine
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem
from tests.engine.build import attach, backbone_of, exact, mixed_trials
from tests.tiny import SUPPORTED, WINDOW, tiny_model
from tests.tiny_tokenizer import VOCAB

# Slot -> task, prompt length, the pass in which it joins. Prompts reach over the sliding window, or will.
Join = tuple[str | None, int, int]
JOINS: Mapping[int, Join] = {
    0: ("all", 3, 0),
    1: ("drop", WINDOW + 5, 0),
    2: (None, 9, 1),
    3: ("all", 1, 2),
    4: ("short", WINDOW - 2, 2),
}
PASSES = 8


def _known(slot: int) -> list[int]:
    """All tokens that slot's sequence will ever have."""
    length = JOINS[slot][1] + PASSES
    return np.random.default_rng(slot).integers(3, VOCAB, length).tolist()


def _decode(
    engine: Engine, *, joins: Mapping[int, Join] = JOINS, leave: Mapping[int, int] | None = None
) -> dict[int, list[torch.Tensor]]:
    """Feed every slot its known tokens, one a pass after its prompt; the logits each pass left, by slot."""
    source = DecodeSource()
    engine.sources["prompts"] = source
    seen: dict[int, list[torch.Tensor]] = {slot: [] for slot in joins}
    for number in range(PASSES):
        for slot, (_, prompt, first) in joins.items():
            if first == number:
                source.states[slot] = DecodeState(_known(slot)[:prompt])
        if not source.states:
            continue
        items = [
            WorkItem(name, "decode", "prompts", tuple(source.reference(slot) for slot in slots))
            for name in dict.fromkeys(task for task, _, _ in joins.values())
            if (slots := [slot for slot in source.states if joins[slot][0] == name])
        ]
        engine.execute(RoundSchedule(number, (MicroBatch(0, 0, tuple(items)),)))
        for slot, state in list(source.states.items()):
            assert state.logits_V is not None and state.cached == len(state.ids)
            seen[slot].append(state.logits_V)
            state.ids.append(_known(slot)[len(state.ids)])
            if (leave or {}).get(slot) == number:
                source.finish(slot)
    return seen


def _recomputed(engine: Engine, slot: int, tokens: int) -> torch.Tensor:
    """The logits after `tokens` tokens of a slot's sequence, in a pass of its own without a history."""
    source = DecodeSource({0: DecodeState(_known(slot)[:tokens])})
    engine.sources["again"] = source
    item = WorkItem(JOINS[slot][0], "decode", "again", (source.reference(0),))
    engine.execute(RoundSchedule(0, (MicroBatch(0, 0, (item,)),)))
    logits_V = source.states[0].logits_V
    assert logits_V is not None
    return logits_V


@pytest.mark.parametrize("arch", SUPPORTED)
def test_a_step_from_the_cache_equals_computing_the_whole_sequence(arch: str) -> None:
    with exact(torch.float64):
        engine = Engine(backbone_of(arch, torch.float64))
        for trial in mixed_trials(arch)[:3]:
            attach(engine, trial)
        seen = _decode(engine, leave={1: 3})
        for slot, (_, prompt, joins) in JOINS.items():
            assert len(seen[slot]) == (4 if slot == 1 else PASSES - joins)
            for place, logits_V in enumerate(seen[slot]):
                assert torch.allclose(logits_V, _recomputed(engine, slot, prompt + place), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_bare_backbone_decodes_as_the_untouched_model_does(arch: str) -> None:
    with exact(torch.float64):
        seen = _bare(arch)
        model = tiny_model(arch, dtype=torch.float64)
        with torch.no_grad():
            logits_TV = model(torch.tensor([_known(2)]), use_cache=False).logits[0]
        for place, logits_V in enumerate(seen):
            assert torch.allclose(logits_V, logits_TV[JOINS[2][1] - 1 + place], rtol=1e-10, atol=1e-11)


def _bare(arch: str) -> list[torch.Tensor]:
    engine = Engine(backbone_of(arch, torch.float64))
    for trial in mixed_trials(arch)[:3]:
        attach(engine, trial)
    return _decode(engine)[2]


def test_adapters_matter_and_the_twin_agrees() -> None:
    fast, plain = Engine(backbone_of()), Engine(backbone_of(), plain=True)
    for engine in (fast, plain):
        for trial in mixed_trials("llama")[:3]:
            attach(engine, trial)
    for slot, logits in _decode(fast).items():
        for own, twin in zip(logits, _decode(plain)[slot], strict=True):
            assert torch.allclose(own, twin, rtol=1e-4, atol=1e-4)
    before = _recomputed(fast, 0, 5)
    with torch.no_grad():
        fast.task("all").adapter.parameters.values.zero_()
    assert not torch.allclose(before, _recomputed(fast, 0, 5), atol=1e-2)


def test_other_tasks_beside_it_change_no_bit_of_what_a_task_decodes() -> None:
    engine = Engine(backbone_of("qwen2"))
    for trial in mixed_trials("qwen2")[:3]:
        attach(engine, trial)
    together = _decode(engine)
    for name in ("all", "drop", "short", None):
        own = {slot: join for slot, join in JOINS.items() if join[0] == name}
        for slot, logits in _decode(engine, joins=own).items():
            assert len(logits) == len(together[slot])
            assert all(torch.equal(one, other) for one, other in zip(logits, together[slot], strict=True))


def test_a_sequence_that_leaves_frees_its_keys_and_values() -> None:
    source = DecodeSource({0: DecodeState([3, 4, 5]), 1: DecodeState([6, 7])})
    engine = Engine(backbone_of())
    engine.sources["prompts"] = source
    item = WorkItem(None, "decode", "prompts", (source.reference(0), source.reference(1)))
    engine.execute(RoundSchedule(0, (MicroBatch(0, 0, (item,)),)))
    held = source.cache.slots
    source.finish(0)
    assert held == {0, 1} and source.cache.slots == {1} and set(source.states) == {1}
