"""Any mix of tasks of any types, coming and going as they like: each ends as it would have ended alone, to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.errors import DataError, StateError
from tests.engine.build import backbone_of
from tests.engine.cast import ARCHS, cast
from tests.engine.mixes import ROUNDS, TYPES, Play, alone, played, plays
from tests.engine.prompts import PeftTrial
from tests.engine.selective import attach
from tests.sequences import random_sequences


def _each_is_as_alone(play: Play) -> None:
    weights = [parameter.clone() for parameter in play.backbone.model.parameters()]
    outcomes = played(play)
    for member in play.members:
        together = outcomes[member.name]
        detached = member.leaves is not None and member.leaves[1] == "detach" and member.leaves[0] < ROUNDS
        solo = alone(play, member, len(together.steps), stays=not detached)
        assert together.steps == solo.steps
        assert together.logprobs == solo.logprobs
        assert torch.equal(together.values, solo.values)
        assert together.moments.keys() == solo.moments.keys()
        assert all(torch.equal(together.moments[name], solo.moments[name]) for name in solo.moments)
        assert all(math.isfinite(step.loss) and step.error is None for step in together.steps)
    assert all(torch.equal(*pair) for pair in zip(weights, play.backbone.model.parameters(), strict=True))


@pytest.mark.parametrize("first", TYPES)
@given(st.data())
@settings(max_examples=3, derandomize=True, database=None, phases=[Phase.generate])
def test_whoever_comes_and_goes_each_task_ends_as_alone(first: str, data: st.DataObject) -> None:
    """A play that fails is not shrunk, which could take minutes; the long test below does that."""
    _each_is_as_alone(data.draw(plays(first)))


@pytest.mark.full
@pytest.mark.timeout(3600)
@given(plays())
@settings(max_examples=600, database=None)
def test_whoever_comes_and_goes_each_task_ends_as_alone_at_length(play: Play) -> None:
    _each_is_as_alone(play)


def test_an_empty_round_does_nothing() -> None:
    engine = Engine(backbone_of())
    record = engine.execute(engine.schedule([]))
    assert record.actions == () and engine.forward_backward({}) == {} == engine.forward({})


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arch", ARCHS)
def test_who_brings_nothing_to_learn_learns_nothing_and_is_in_nobodys_way(arch: str, recompute: bool) -> None:
    """Sequences that have nothing to predict, for each type in turn."""
    engine = Engine(backbone_of(arch), recompute=recompute)
    tasks = {trial.name: attach(engine, trial) for trial in cast(arch)}
    silent = random_sequences([6], seed=1)[0]
    silent.mask[:] = False
    one_token = TokenSequence(1, np.array([5], dtype=np.int32), np.array([False]))
    alone = {name: _gradient(engine, {tasks[name]: tasks[name].data.train}, name) for name in ("ia3", "lora")}
    for name, empty in tasks.items():
        beside = "ia3" if name != "ia3" else "lora"
        for batch in ([one_token], [silent], [one_token, silent, one_token]):
            batches = {empty: batch, tasks[beside]: tasks[beside].data.train}
            assert torch.equal(_gradient(engine, batches, beside), alone[beside])
            assert empty.has_pending and not empty.adapter.parameters.gradient.any()
            empty.drop_pending()


def _gradient(engine: Engine, batches: Mapping[Task | str, Sequence[TokenSequence]], name: str) -> torch.Tensor:
    """What one of the tasks gets from a pass over these; nothing of it stays."""
    assert engine.forward_backward(batches)[name].tokens > 0
    task = engine.task(name)
    gradient = task.adapter.parameters.gradient.clone()
    assert gradient.any()
    task.drop_pending()
    return gradient


def test_what_has_no_tokens_or_no_gradient_is_refused() -> None:
    engine = Engine(backbone_of())
    task = attach(engine, PeftTrial("lora", cast("llama")[0].peft, [5, 9]))
    nothing = TokenSequence(3, np.array([], dtype=np.int32), np.array([], dtype=bool))
    with pytest.raises(DataError, match="example 3 is empty"):
        engine.forward_backward({task: [*task.data.train, nothing]})
    assert not task.has_pending and not task.adapter.parameters.gradient.any()
    with pytest.raises(DataError, match="batch is empty"):
        engine.forward_backward({task: []})
    with pytest.raises(StateError, match="no gradient to apply"):
        engine.optim_step(task)
    with pytest.raises(DataError, match="is empty"):
        engine.attach(PeftTrial("other", cast("llama")[0].peft, [5]).job, Sequences((nothing,)))
    engine.attach(PeftTrial("idle", cast("llama")[0].peft, [5]).job, Sequences(()))
    with pytest.raises(StateError, match="no training data"):
        engine.task("idle").participant()
