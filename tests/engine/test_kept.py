"""Activations of a cut sequence kept until it trains: the bits of running its pieces twice, with one pass less."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.failure import PassError
from muxtune.engine.runner import Runner
from muxtune.engine.trace_file import read_traces
from muxtune.models.backbone import Backbone
from muxtune.models.memory import footprint
from muxtune.plan.types import MicroBatch, RoundRecord
from muxtune.spec.event import TaskEvent
from muxtune.spec.peft import IA3, Lora, PeftBase, PrefixTuning, PromptTuning
from tests.engine import runs
from tests.engine.build import backbone_of, exact
from tests.engine.pairs import Outcome, PairTrial, attach, train
from tests.engine.prompts import PeftTrial
from tests.engine.test_cut import LENGTHS, SPECS
from tests.engine.test_cut import _attached as cut_task
from tests.peak import peak_bytes
from tests.tiny import tiny_folder

ALL = 10_000


def _assert_same(one: dict[str, Outcome], other: dict[str, Outcome]) -> None:
    for name, outcome in one.items():
        assert outcome.numbers == other[name].numbers and outcome.steps
        assert torch.equal(outcome.values, other[name].values)
        assert all(torch.equal(moment, other[name].moments[key]) for key, moment in outcome.moments.items())


def _gradient(backbone: Backbone, name: str, **options: Any) -> tuple[float, Tensor]:
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        task = cut_task(engine, SPECS[name], 16)
        outcome = engine.forward_backward({task: task.data.train})["only"]
    return outcome.loss_sum, task.adapter.parameters.gradient.clone()


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2"])
def test_every_type_has_the_gradient_of_running_twice_to_the_bit(arch: str, name: str, plain: bool) -> None:
    """Learned rows and prefixes, dropout, norms and whole sublayers among them."""
    for dtype in (torch.float32, torch.bfloat16)[: 1 if plain else 2]:
        backbone = backbone_of(arch, dtype)
        loss, gradient = _gradient(backbone, name, plain=plain)
        for keep_tokens in (ALL, 40):
            kept_loss, kept = _gradient(backbone, name, plain=plain, keep_tokens=keep_tokens)
            assert kept_loss == loss and torch.equal(kept, gradient) and bool(kept.any())


TYPES: dict[str, PeftBase] = {
    "lora": Lora(r=3, lora_dropout=0.2),
    "ia3": IA3(),
    "prefix": PrefixTuning(num_virtual_tokens=3),
    "prompt": PromptTuning(num_virtual_tokens=2),
}


@st.composite
def mixes(draw: st.DrawFn) -> list[PeftTrial | PairTrial]:
    """Tasks of any type, lengths and budgets, sequences cut and not; perhaps one of dpo beside them."""
    made: list[PeftTrial | PairTrial] = []
    for seed in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(2, 40), min_size=1, max_size=4))
        peft = TYPES[draw(st.sampled_from(list(TYPES)))]
        budget = draw(st.integers(5, 24))
        made.append(
            PeftTrial(f"task{seed}", peft, lengths, batch=len(lengths), steps=2, seed=seed, chunk_tokens=budget)
        )
    if draw(st.booleans()):
        budget = draw(st.integers(8, 40))
        made.append(PairTrial("pair", TYPES["lora"], (4, 9), ((3, 18), (12, 2)), steps=1, chunk_tokens=budget))
    return made


@settings(max_examples=25)
@given(mixes(), st.sampled_from(["fuse-all", "sequential", "padded"]), st.integers(10, 120), st.integers(5, 200))
def test_whoever_runs_together_and_however_much_is_kept(
    trials: list[PeftTrial | PairTrial], policy: str, fuse_tokens: int, keep_tokens: int
) -> None:
    backbone = backbone_of("llama")
    if not Engine(backbone).row_invariant:
        pytest.skip("rows of a product depend on the batch on this machine")
    twice = train(backbone, trials, policy=policy, fuse_tokens=fuse_tokens)
    for rows in (keep_tokens, ALL):
        _assert_same(twice, train(backbone, trials, policy=policy, fuse_tokens=fuse_tokens, keep_tokens=rows))


def _record(engine: Engine, lengths: tuple[int, ...] = LENGTHS) -> RoundRecord:
    return engine.execute(engine.schedule([cut_task(engine, SPECS["lora"], 16, lengths).participant()]))


def test_what_is_kept_runs_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of()
    ran = Counter[bool]()
    hidden = backbone.hidden

    def counted(*arguments: Any, **options: Any) -> Tensor:
        ran[torch.is_grad_enabled()] += 1
        return hidden(*arguments, **options)

    monkeypatch.setattr(backbone, "hidden", counted)
    twice = _record(Engine(backbone))
    assert ran == {False: 3 + 2, True: 4 + 3}  # the tails of 60 and 37 have room for 9 and 3
    ran.clear()
    record = _record(Engine(backbone, keep_tokens=ALL))
    assert ran == {True: 4 + 3}
    resumed = [action for action in record.schedule.actions if isinstance(action, MicroBatch) and action.resumes]
    assert len(resumed) == 5 and all(record.actions[record.schedule.actions.index(one)].rows == 0 for one in resumed)
    assert record.tokens == sum(LENGTHS) == twice.tokens - 5 * 16 and record.rows == twice.rows - 5 * 16
    assert [action.step for action in record.actions][-1] == [action.step for action in twice.actions][-1]


def test_a_schedule_that_breaks_off_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of()
    engine = Engine(backbone, keep_tokens=ALL)
    task = cut_task(engine, SPECS["lora"], 16)
    hidden, passes = backbone.hidden, 0

    def breaking(*arguments: Any, **options: Any) -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise RuntimeError("the device is on fire")
        return hidden(*arguments, **options)

    monkeypatch.setattr(backbone, "hidden", breaking)
    with pytest.raises(PassError, match="on fire"):
        engine.execute(engine.schedule([task.participant()]))
    assert not engine._executor._cut._kept and not engine._executor._cut.carry.slots
    record = engine.execute(engine.schedule([task.participant()]))
    assert record.actions[-1].step == _record(Engine(backbone)).actions[-1].step


def _peak_bytes(length: int, keep_tokens: int) -> int:
    """Of a round of one sequence in pieces of 16."""
    engine = Engine(backbone_of(layers=8), keep_tokens=keep_tokens)
    task = cut_task(engine, SPECS["rslora"], 16, (length,))
    participant = task.participant()
    engine.execute(engine.schedule([participant]))  # whatever is made once
    return peak_bytes(lambda: engine.execute(engine.schedule([participant])))


def test_a_kept_row_costs_its_activations_and_one_that_runs_twice_next_to_nothing(tmp_path: Path) -> None:
    """Both measured; admission's estimate of a row covers what is kept."""
    row = footprint(tiny_folder(tmp_path / "model", "llama", layers=8), torch.float32)
    rows = 160 - 48
    twice = (_peak_bytes(160, 0) - _peak_bytes(48, 0)) / rows
    kept = (_peak_bytes(160, ALL) - _peak_bytes(48, ALL)) / rows
    assert twice < 1.3 * row.position_bytes + 16 * 4  # keys, values and their gradients; a mask
    assert 0.5 * row.row_bytes < kept < row.row_bytes + row.position_bytes
    some = (_peak_bytes(160, 64) - _peak_bytes(160, 0)) / 64
    assert 0.5 * row.row_bytes < some < row.row_bytes


def test_who_has_no_memory_for_what_it_keeps_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, too: its passes recompute then, and nothing is kept between them."""
    backbone = backbone_of()
    trial = PeftTrial("only", TYPES["lora"], LENGTHS, batch=4, steps=3, chunk_tokens=16)
    expected = train(backbone, [trial])
    engine = Engine(backbone, keep_tokens=ALL)
    task = attach(engine, trial)
    hidden, told = backbone.hidden, list[bool]()

    def short(*arguments: Any, recompute: bool = False) -> Tensor:
        told.append(recompute)
        if torch.is_grad_enabled() and not recompute and task.step == 1:
            raise MemoryError("too much is kept")
        return hidden(*arguments, recompute=recompute)

    monkeypatch.setattr(backbone, "hidden", short)
    events = list(Runner(engine).run())
    (warning,) = [event for event in events if isinstance(event, TaskEvent) and event.kind == "warning"]
    assert "computed twice" in warning.message and task.step == 3
    assert torch.equal(task.adapter.parameters.values, expected["only"].values)
    assert told.count(True) == 2 * (4 + 3) and True in told


def test_passes_that_fail_together_keep_less_from_then_on() -> None:
    engine = Engine(backbone_of(), keep_tokens=100)
    engine.fuse_below(300)
    assert engine.keep_tokens == 50


def test_a_run_keeps_what_it_has_room_for(data: Path, disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by its trace; the bits are those of a machine that has room for a chunk only."""
    monkeypatch.setattr("muxtune.engine.admission.DEFAULT_CHUNK_TOKENS", 16)
    model = tiny_folder(disk / "model", "llama", layers=12)
    needs = footprint(model, torch.float32)
    lean = needs.weights_bytes + 500_000 + needs.activation_bytes(16, 60)
    ended = {}
    for name, free in (("roomy", 10**9), ("tight", lean)):
        monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device, free=free: (0, free))
        events = runs.train(runs.run_of(model, disk / name, [runs.job(data, "sql", max_steps=2)]), cache_dir=cache)
        passes = [one for record in read_traces(disk / name) for one in record.schedule.actions]
        kept = {one.keep for one in passes if isinstance(one, MicroBatch) and one.items[0].kind == "carry"}
        ended[name] = kept, runs.losses_of(events, "sql"), runs.bits(disk / name / "sql")
    assert ended["roomy"][0] == {True} and False in ended["tight"][0]
    assert ended["roomy"][1:] == ended["tight"][1:]
