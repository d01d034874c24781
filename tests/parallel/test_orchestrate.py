"""Slots: the order is the plan's on all ranks, overlapping changes no bit, and the records show that it overlaps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.rounds import run_round
from muxtune.engine.task import Sequences
from muxtune.parallel.mesh import Sum, TensorAxis
from muxtune.parallel.orchestrate import Part, PassTimes, Record, order_of, run_slot, run_slot_plain
from muxtune.parallel.steps import Steps, run_plain
from muxtune.parallel.tensor import load_sharded
from muxtune.plan.cost import PassCost
from muxtune.plan.pipeline import StageAction
from muxtune.plan.timeline import Event, Timeline
from muxtune.spec.cluster import ClusterSpec, Link
from muxtune.spec.peft import BitFit, Lora, PrefixTuning, PromptTuning
from tests.engine.build import CPU, exact
from tests.engine.prompts import PeftTrial
from tests.engine.test_raising import break_
from tests.parallel.ranks import RankGroup
from tests.parallel.test_tensor import LLAMA_ONLY, TOLERANCE, all_trials
from tests.parallel.trained import Options, assert_equal, on_one, on_rank


@dataclass(slots=True)
class Noted:
    """Something to wait for that says when it was."""

    name: str
    notes: list[str]
    ready: bool = True

    def done(self) -> bool:
        return self.ready

    def wait(self) -> None:
        """Note it."""
        self.notes.append(f"{self.name} there")


def _steps(name: str, pieces: int, notes: list[str]) -> Steps[None]:
    for piece in range(pieces):
        notes.append(f"{name}{piece}")
        if piece < pieces - 1:
            yield Noted(f"{name}{piece}", notes)


def _part(htask: int, steps: Steps[None], direction: str = "forward") -> Part:
    way = "forward" if direction == "forward" else "backward"
    return Part(StageAction(way, htask, 0, 0), (f"t{htask}",), steps)


def test_passes_are_resumed_in_the_order_given_and_then_in_turn() -> None:
    notes: list[str] = []
    passes = [[_part(0, _steps("a", 3, notes))], [_part(1, _steps("b", 2, notes)), _part(1, _steps("c", 2, notes))]]
    run_slot(passes, [1, 0, 0])
    expected = ["b0", "a0", "a0 there", "a1", "a1 there", "a2", "b0 there", "b1", "c0", "c0 there", "c1"]
    assert notes == expected


def test_the_twin_runs_one_after_another_and_waits_at_once() -> None:
    notes: list[str] = []
    run_slot_plain([[_part(0, _steps("a", 3, notes))], [_part(1, _steps("b", 2, notes))]])
    assert notes == ["a0", "a0 there", "a1", "a1 there", "a2", "b0", "b0 there", "b1"]
    notes.clear()
    run_plain(_steps("a", 2, notes))
    assert notes == ["a0", "a0 there", "a1"]


def test_what_a_part_raises_leaves_nothing_under_way() -> None:
    notes: list[str] = []

    def breaking() -> Steps[None]:
        yield Noted("x", notes)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_slot([[_part(0, _steps("a", 3, notes))], [_part(1, breaking())]], [0, 1, 1, 0])
    assert notes == ["a0", "x there", "a0 there"]


def test_a_pass_that_comes_back_has_as_many_turns_as_pieces() -> None:
    """2 collectives a layer forward, as many back but for the first layer's attention, and a last piece."""
    times = PassTimes(1.0, 1.0, 0.5, 1.0)
    assert order_of([times.both(3)]) == [0] * (4 * 3 + 1)
    assert order_of([times.forth(3)]) == [0] * (2 * 3 + 1)
    assert order_of([times.back(3)]) == [0] * (2 * 3)
    order = order_of([times.both(3)] * 2)
    assert order.count(0) == order.count(1)
    assert any(one != other for one, other in pairwise(order))


def _counting() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


def test_records_are_in_the_plans_words() -> None:
    record, notes = Record(_counting(), stage=3), list[str]()
    run_slot([[_part(0, _steps("a", 2, notes))], [_part(1, _steps("b", 2, notes), "backward")]], [0, 1], record)
    events = record.events
    assert [str(event.resource) for event in events].count("stage 3 collective") == 2
    assert {(event.what, event.action.direction, event.tasks) for event in events} == {
        ("forward", "forward", ("t0",)),
        ("backward", "backward", ("t1",)),
        ("comm", "forward", ("t0",)),
        ("comm", "backward", ("t1",)),
    }
    assert overlapped(events)
    first, second = (event for event in events if event.what == "comm")
    assert first.end_s <= second.start_s, "a link does one thing at a time"


def overlapped(events: Sequence[Event]) -> float:
    """Seconds in which a collective runs while something computes."""
    spans = {
        kind: [(event.start_s, event.end_s) for event in events if event.resource.kind == kind]
        for kind in ("compute", "collective")
    }
    return sum(
        max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
        for one in spans["compute"]
        for other in spans["collective"]
    )


def test_a_slot_equals_its_twin_to_the_bit_and_one_device(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    """Every type, each task an hTask of its own, four at a time."""
    for arch, trials in (("llama-uneven", all_trials() + LLAMA_ONLY), ("gpt2", all_trials())):
        expected = on_one(folder(arch), trials, Options())
        overlapping = pair.ask(on_rank, folder(arch), trials, Options(together=4, fuse_tokens=1))
        plain = pair.ask(on_rank, folder(arch), trials, Options(together=4, fuse_tokens=1, overlap=False))
        for found, twin in zip(overlapping, plain, strict=True):
            for name, outcome in found.items():
                assert_equal(outcome, expected[name], TOLERANCE)
                assert outcome.losses == twin[name].losses and outcome.norms == twin[name].norms
                assert all(torch.equal(value, twin[name].state[key]) for key, value in outcome.state.items())


def test_a_slot_whose_layers_recompute(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    trials = all_trials() + LLAMA_ONLY
    options = Options(together=3, fuse_tokens=60)
    kept = pair.ask(on_rank, folder("llama"), trials, options)
    again = pair.ask(on_rank, folder("llama"), trials, Options(together=3, fuse_tokens=60, recompute=True))
    for found, twin in zip(kept, again, strict=True):
        for name, outcome in found.items():
            assert outcome.losses == twin[name].losses
            assert all(torch.equal(value, twin[name].state[key]) for key, value in outcome.state.items())


def test_cut_sequences_whose_activations_are_kept(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    """Such passes are no subgraphs: they go on from a graph of all layers. Others between them are."""
    trials = [
        PeftTrial("cut", Lora(r=4), [50, 44], batch=2, chunk_tokens=16),
        PeftTrial("prompt", PromptTuning(num_virtual_tokens=3), [40, 9], batch=2, seed=2, chunk_tokens=20),
        PeftTrial("prefix", PrefixTuning(num_virtual_tokens=4), [30, 12], batch=2, seed=3, chunk_tokens=16),
        PeftTrial("whole", BitFit(), [12, 9], batch=2, seed=4),
    ]
    expected = on_one(folder("llama"), trials, Options())
    for keep_tokens, fuse_tokens in ((0, 1), (1000, 1), (1000, 40)):
        options = Options(together=4, fuse_tokens=fuse_tokens, keep_tokens=keep_tokens)
        for found in pair.ask(on_rank, folder("llama"), trials, options):
            for name, outcome in found.items():
                assert_equal(outcome, expected[name], TOLERANCE)


def test_expected_times_are_those_of_the_simulator() -> None:
    cost = PassCost(rows=64, entry_s=0.0, forward_s=2.0, backward_s=4.0, exit_s=1.0)
    link = Link(bandwidth=1_000_000, latency_s=0.5)
    times = PassTimes.expected(cost, ClusterSpec(devices=2, tp=2, speed=2.0, tp_link=link), row_bytes=1000)
    assert times == PassTimes(1.0, 2.0, link.all_reduce_s(64_000, 2), 0.5)


@dataclass(frozen=True, slots=True)
class Late(TensorAxis):
    """An axis whose rank now and then does something else first, and whose sums take long."""

    seed: int = 0

    def start_sum(self, value: Tensor) -> Sum:
        """Sleep, then begin."""
        time.sleep(random.Random(self.seed * 7919 + self.rank * 104729 + value.numel() + id(value)).random() * 3e-3)
        return TensorAxis.start_sum(self, value)


def _late(axis: TensorAxis, path: Path, trials: Sequence[PeftTrial], options: Options, seed: int) -> object:
    return on_rank(Late(axis.rank, axis.size, axis.group, seed), path, trials, options)


def test_ranks_that_are_late_at_random_pair_the_same_collectives(
    pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    trials = all_trials()[1:5]
    options = Options(together=4, fuse_tokens=1)
    expected = pair.ask(on_rank, folder("llama"), trials, options)
    for seed in range(3):
        for found, twin in zip(pair.ask(_late, folder("llama"), trials, options, seed), expected, strict=True):
            for name, outcome in found.items():
                assert outcome.losses == twin[name].losses
                assert all(torch.equal(value, twin[name].state[key]) for key, value in outcome.state.items())


def test_collectives_overlap_compute_in_a_slot_and_never_in_the_twin(
    pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    for events in pair.ask(_recorded, folder("llama"), True):
        assert overlapped(events) > 0
        line = Timeline(1, events, max(event.end_s for event in events), 1, 330)
        assert 0 <= line.stall_share <= 1 - line.utilisation[0]
    for events in pair.ask(_recorded, folder("llama"), False):
        assert overlapped(events) == 0
        assert {event.what for event in events} == {"forward", "backward", "comm"}


def _recorded(axis: TensorAxis, path: Path, overlap: bool) -> tuple[Event, ...]:
    backbone = load_sharded(path, axis, dtype=torch.float64, device=CPU)
    with exact(torch.float64):
        engine = Engine(backbone, together=3, fuse_tokens=1, overlap=overlap)
        trials = [PeftTrial(f"t{number}", Lora(r=4), [60, 50], batch=2, seed=number) for number in range(3)]
        for trial in trials:
            engine.attach(trial.job, Sequences(trial.examples))
        schedule = engine.schedule([task.participant() for task in engine.tasks.values()])
        record = engine.recorded(schedule, time.perf_counter)
    own = [event for event in record.events if event.resource.kind == "collective"]
    layers, passes = 2, 3
    assert len(own) == passes * (2 * layers + 2 * layers - 1)
    return record.events


def test_a_task_that_raises_in_a_slot_costs_nobody_else_anything(
    pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    for where in ("forward", "backward"):
        for raised, states, expected in pair.ask(_with_a_fault, folder("llama"), where):
            assert raised == {"bad"}
            assert states.keys() == expected.keys() == {"one", "two"}
            for name, state in states.items():
                assert all(torch.equal(value, expected[name][key]) for key, value in state.items())


def _with_a_fault(axis: TensorAxis, path: Path, where: str) -> tuple[set[str | None], object, object]:
    """Who raised, and what the others came to, with the one that raises and without."""
    names, lora = ("one", "bad", "two"), Lora(r=4, lora_dropout=0.1)
    trials = [PeftTrial(name, lora, [9, 7], batch=2, seed=seed) for seed, name in enumerate(names)]
    found = []
    for broken in (True, False):
        backbone = load_sharded(path, axis, dtype=torch.float64, device=CPU)
        with exact(torch.float64):
            engine = Engine(backbone, together=3, fuse_tokens=1)
            own = [trial for trial in trials if broken or trial.name != "bad"]
            tasks = {trial.name: engine.attach(trial.job, Sequences(trial.examples)) for trial in own}
            if broken:
                break_(tasks["bad"], where)
            ran = run_round(engine, [task.participant() for task in tasks.values()])
        found.append((set(ran.raised), {n: t.adapter.state() for n, t in tasks.items() if n != "bad"}))
    (raised, states), (_, expected) = found
    return raised, states, expected
