"""How a pipeline runs: what overlaps and what does not, whoever is slow; what it refuses; what all stages agree on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.engine import Engine
from muxtune.engine.runner import Runner
from muxtune.engine.task import Sequences
from muxtune.errors import AdapterError, RankError, StateError
from muxtune.models import attention
from muxtune.models.backbone import Backbone
from muxtune.models.weights import load_model
from muxtune.parallel.chain import WholeLayers
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.stage import load_stage
from muxtune.parallel.steps import Steps
from muxtune.peft.registry import build_adapter, payload
from muxtune.plan.timeline import Event
from muxtune.plan.turns import Turn, stage_turns
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem
from muxtune.spec.event import EvalResult, Rewards
from muxtune.spec.peft import IA3, Lora, PeftBase, Shira
from tests.engine.build import CPU, exact
from tests.engine.pairs import PairTrial
from tests.engine.prompts import PeftTrial
from tests.parallel.ranks import RankGroup
from tests.parallel.trained import Options, assert_equal, folder_of, mesh_of, on_one, on_stage

_TRIALS = [PeftTrial(f"t{number}", Lora(r=2), [9, 20, 7, 12], seed=number, chunk_tokens=24) for number in range(4)]


_Way = Callable[[WholeLayers, Tensor], Steps[Tensor | None]]


def _engine(axis: TensorAxis, path: Path, **options: bool) -> Engine:
    backbone = load_stage(path, mesh_of(axis, 1, axis.size), dtype=torch.float64, device=CPU)
    return Engine(backbone, fuse_tokens=1, **options)  # type: ignore[arg-type]


@contextmanager
def _slowed(seed: int, least_s: float, most_s: float) -> Iterator[None]:
    """Every stage takes some time for its layers, each time another one."""
    draw = random.Random(seed)

    def slow(own: _Way) -> _Way:
        def run(chain: WholeLayers, rows_TD: Tensor) -> Steps[Tensor | None]:
            time.sleep(draw.uniform(least_s, most_s))
            return (yield from own(chain, rows_TD))

        return run

    forward, backward = slow(WholeLayers.forward), slow(WholeLayers.backward)
    with mock.patch.multiple(WholeLayers, forward=forward, backward=backward):
        yield


def _recorded(axis: TensorAxis, path: Path, overlap: bool) -> tuple[RoundSchedule, list[Event]]:
    """A round of four tasks, of two passes each, on slowed stages."""
    engine = _engine(axis, path, overlap=overlap)
    tasks = [engine.attach(trial.job, Sequences(trial.examples), chunk_tokens=24) for trial in _TRIALS]
    schedule = engine.schedule([task.participant() for task in tasks])
    with _slowed(0, 0.02, 0.02):
        return schedule, engine.recorded(schedule, time.monotonic).events


def _common_s(one: Sequence[Event], other: Sequence[Event]) -> float:
    return sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in one for b in other)


def test_stages_compute_at_once_where_passes_overlap_and_never_one_by_one(
    pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    found = {}
    for overlap in (True, False):
        answers = pair.ask(_recorded, folder("llama"), overlap)
        (schedule, first), (_, second) = answers
        for stage, (_, events) in enumerate(answers):
            assert {event.resource.stage for event in events} == {stage}
            if overlap:  # in the order that was planned, one turn after another
                ran = list(dict.fromkeys((event.what, event.action.htask, event.action.chunk) for event in events))
                assert ran == [_told(schedule, turn) for turn in stage_turns(schedule, 2, stage)]
        passes = [[event for event in events if event.what != "step"] for events in (first, second)]
        found[overlap] = _common_s(*passes), min(sum(e.end_s - e.start_s for e in one) for one in passes)
    common_s, busy_s = found[True]
    assert common_s > 0.4 * busy_s
    common_s, busy_s = found[False]
    assert common_s < 0.1 * busy_s  # what is not the layers' work: laying rows out, say


def _told(schedule: RoundSchedule, turn: Turn) -> tuple[str, int, int]:
    """A step is of the last pass before it."""
    passes = [one for one in schedule.actions[: turn.index + 1] if isinstance(one, MicroBatch)]
    return turn.direction, passes[-1].htask, passes[-1].chunk


def _slowly(axis: TensorAxis, path: Path, trials: Sequence[PeftTrial | PairTrial], seed: int) -> object:
    with _slowed(seed + axis.rank, 0.0, 0.02):
        return on_stage(axis, path, trials, Options())


def test_whoever_is_slow_it_comes_to_the_same(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    trials = [*_TRIALS, PairTrial("pairs", Lora(r=4), seed=4, chunk_tokens=24)]
    expected = on_one(folder("llama"), trials, Options())
    for seed in (1, 100):
        for found in pair.ask(_slowly, folder("llama"), trials, seed):
            for name, outcome in found.items():
                assert_equal(outcome, expected[name], 1e-9)


def _evaluated(engine: Engine) -> list[list[float]]:
    """Evaluations while it trains, and log-probabilities that a client asks for."""
    trials = [*_TRIALS[:2], PairTrial("pairs", Lora(r=4), steps=2, seed=4, chunk_tokens=24)]
    with exact(torch.float64):
        tasks = [
            engine.attach(trial.job, Sequences(trial.examples, trial.examples[:2]), chunk_tokens=24) for trial in trials
        ]
        told = [
            [outcome.loss_sum, outcome.correct, *(outcome.logprobs or ())]
            for outcome in engine.forward({task: task.data.train[:2] for task in tasks}).values()
        ]
        for event in Runner(engine).run():
            if isinstance(event, EvalResult):
                rewards = event.rewards or Rewards(0.0, 0.0)
                told.append([event.step, event.loss, event.accuracy, event.tokens, rewards.chosen, rewards.rejected])
    return told


def _evaluated_on_stage(axis: TensorAxis, path: Path) -> list[list[float]]:
    return _evaluated(_engine(axis, path))


def test_what_only_goes_forward_comes_to_the_same_on_every_stage(
    pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    attention.register()
    model = load_model(folder_of(folder("llama")), dtype=torch.float64, device="cpu", attn_implementation="eager")
    expected = _evaluated(Engine(Backbone(model), fuse_tokens=1))
    assert len(expected) > 3
    first, second = pair.ask(_evaluated_on_stage, folder("llama"))
    assert first == second
    for one, other in zip(first, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def _poisoned(axis: TensorAxis, path: Path) -> tuple[str | None, str | None, bool]:
    """One task's parameters on the first stage are not finite; what each task's step says, and whether it was taken."""
    engine = _engine(axis, path)
    bad, good = (engine.attach(trial.job, Sequences(trial.examples)) for trial in _TRIALS[:2])
    if axis.rank == 0:
        bad.adapter.parameters.gradient[0] = float("nan")
    engine.forward_backward({bad: bad.data.train[:2], good: good.data.train[:2]})
    before = bad.adapter.parameters.values.clone()
    errors = [engine.optim_step(task).error for task in (bad, good)]
    return errors[0], errors[1], torch.equal(before, bad.adapter.parameters.values)


def test_a_step_that_is_not_finite_on_one_stage_is_dropped_on_all(
    pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    for bad, good, same in pair.ask(_poisoned, folder("llama")):
        assert bad is not None and bad.startswith("non_finite_gradient")
        assert good is None and same


def _refused(axis: TensorAxis, path: Path) -> list[str]:
    engine, told = _engine(axis, path), []
    source = DecodeSource({0: DecodeState([3, 4, 5])})
    item = WorkItem(None, "decode", "talk", (source.reference(0),))
    try:
        with engine.lending({"talk": source}):
            engine.execute(RoundSchedule(0, (MicroBatch(0, 0, (item,)),)))
    except StateError as error:
        told.append(str(error))
    trial = PeftTrial("none", Lora(target_modules=("nowhere",)), [9])
    try:
        engine.attach(trial.job, Sequences(trial.examples))
    except AdapterError as error:
        told.append(str(error))
    return told


def test_what_cannot_be_done_is_refused_on_every_stage_alike(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    first, second = pair.ask(_refused, folder("llama"))
    assert first == second
    decoding, target = first
    assert "cannot decode" in decoding and "muxtune sample" in decoding
    assert "'nowhere' match no linear layer" in target


def _raised(axis: TensorAxis, path: Path) -> str:
    engine = _engine(axis, path)
    task = engine.attach(_TRIALS[0].job, Sequences(_TRIALS[0].examples))
    if axis.rank == 1:
        with mock.patch.object(WholeLayers, "forward", side_effect=MemoryError("no room")):
            return _error_of(engine, task.name)
    mesh = mesh_of(axis, 1, 2)
    assert mesh.pipe.back_in is not None
    with mock.patch.object(type(mesh.pipe.back_in), "receive", side_effect=RankError("lost")):
        return _error_of(engine, task.name)


def _error_of(engine: Engine, name: str) -> str:
    try:
        engine.forward_backward({name: engine.tasks[name].data.train[:2]})
    except RankError as error:
        assert not engine.tasks[name].has_pending
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_pass_that_raises_on_one_stage_ends_the_run(folder: Callable[[str], Path]) -> None:
    group = RankGroup(2, timeout_s=5)
    try:
        first, second = group.ask(_raised, folder("llama"))
    finally:
        group.close()
    assert "lost" in first
    assert "raised on stage 1 (MemoryError: no room)" in second and "from its checkpoints" in second


@dataclass(frozen=True, slots=True)
class _Exported:
    config: object
    tensors: dict[str, Tensor]
    own: int


def _exported(axis: TensorAxis, path: Path, spec: PeftBase) -> _Exported:
    """What a whole adapter that has been put together from stages exports; how many numbers this stage has of it."""
    engine = _engine(axis, path)
    trial = PeftTrial("one", spec, [9], seed=5)
    task = engine.attach(trial.job, Sequences(trial.examples))
    staged, view = engine.sharded["one"], engine.backbone.whole  # type: ignore[attr-defined]
    whole = build_adapter(spec, view, seed=0, dtype=torch.float64, device=CPU)
    whole.load(staged.whole_state())
    staged.load_whole(whole.state())
    made = payload(spec, whole, view)
    return _Exported(made.config, dict(made.tensors), task.adapter.parameters.count)


@pytest.mark.parametrize("spec", [Lora(r=4), IA3(), Shira(), Lora(r=2, target_modules=("lm_head", "q_proj"))], ids=str)
def test_the_whole_adapter_exports_as_from_one_device(
    spec: PeftBase, pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    attention.register()
    model = load_model(folder_of(folder("llama")), dtype=torch.float64, device="cpu", attn_implementation="eager")
    view = Backbone(model, "transformers")
    alone = build_adapter(spec, view, seed=5, dtype=torch.float64, device=CPU)
    expected = payload(spec, alone, view)
    found = pair.ask(_exported, folder("llama"), spec)
    assert sum(one.own for one in found) == alone.parameters.count
    for one in found:
        assert one.config == expected.config
        assert one.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(one.tensors[name], value) for name, value in expected.tensors.items())
