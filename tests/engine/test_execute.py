"""`execute` does what a schedule says and nothing else: its record, its drivers, and the schedules it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from muxtune.data.types import TokenSequence
from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.engine import Engine
from muxtune.engine.failure import PassError
from muxtune.engine.sampling import Request, generate
from muxtune.engine.task import Sequences, Task
from muxtune.errors import DataError, StateError
from muxtune.models.backbone import Backbone
from muxtune.plan.types import (
    Action,
    LossSpec,
    MicroBatch,
    OptimStep,
    Policy,
    RoundRecord,
    RoundSchedule,
    SequenceRef,
    WorkItem,
    WorkKind,
)
from tests.engine.build import (
    Trial,
    assert_same_bits,
    attach,
    backbone_of,
    mixed_trials,
    outcome,
    run,
    start_values,
    train,
)
from tests.sequences import random_sequences

ONE = Trial("one", [5, 17, 9, 21], steps=2, dropout=0.2, seed=1)
TWO = Trial("two", [8, 3, 13, 4], steps=2, r=8, seed=2)


def _pair() -> tuple[Engine, Task, Task]:
    engine = Engine(backbone_of())
    return engine, attach(engine, ONE), attach(engine, TWO)


def test_the_record_says_what_ran_in_the_schedules_own_words() -> None:
    engine, one, two = _pair()
    schedule = engine.schedule([one.participant(), two.participant()])
    record = engine.execute(schedule)
    assert record.schedule is schedule and [action.action for action in record.actions] == [0, 1, 2]
    batch, first, second = record.actions
    assert [(item.task, item.kind, item.input_tokens) for item in batch.items] == [
        ("one", "train", 52),
        ("two", "train", 28),
    ]
    assert batch.rows == 80 and batch.step is None
    assert [item.tokens for item in batch.items] == [
        sum(example.trained_tokens for example in task.data.train) for task in (one, two)
    ]
    for action, task, item in ((first, one, batch.items[0]), (second, two, batch.items[1])):
        assert action.step is not None and action.step.task == task.name and action.step.step == task.step == 1
        assert action.step.loss == item.loss_sum / item.tokens
        assert action.step.accuracy == item.correct / item.tokens
        assert (action.step.tokens, action.step.input_tokens) == (item.tokens, item.input_tokens)
    times = [time for action in record.actions for time in (action.start_s, action.end_s)]
    assert times == sorted(times) and times[-1] <= record.wall_s


def test_padded_runs_as_many_rows_as_the_longest_of_all_sequences_asks_for() -> None:
    backbone = backbone_of()
    record = _round_of(backbone, "padded")
    assert record.rows == 8 * 21 + 8 and record.tokens == 52 + 28  # to a multiple of 16
    packed = _round_of(backbone, "fuse-all")
    assert packed.rows == 80 and packed.tokens == 80


def _round_of(backbone: Backbone, policy: Policy) -> RoundRecord:
    engine = Engine(backbone, policy=policy)
    tasks = [attach(engine, trial) for trial in (ONE, TWO)]
    return engine.execute(engine.schedule([task.participant() for task in tasks]))


def test_a_client_that_drives_the_steps_gets_what_the_runner_gets() -> None:
    backbone = backbone_of("qwen2")
    trials = mixed_trials("qwen2")[:2]
    expected = train(backbone, trials)
    engine = Engine(backbone)
    tasks = [attach(engine, trial) for trial in trials]
    losses: dict[str, list[float]] = {task.name: [] for task in tasks}
    while left := [task for task in tasks if task.step < task.total_steps]:
        batches = {task: [task.data.train[index] for index in task.sampler.batch(task.step)] for task in left}
        outcomes = engine.forward_backward(batches)
        for task in left:
            assert engine.optim_step(task).loss == outcomes[task.name].loss_sum / outcomes[task.name].tokens
            losses[task.name].append(outcomes[task.name].loss_sum / outcomes[task.name].tokens)
    for task in tasks:
        assert losses[task.name] == expected[task.name].losses
        assert torch.equal(task.adapter.parameters.values, expected[task.name].values)
        assert all(
            torch.equal(moment, expected[task.name].moments[key]) for key, moment in task.optimizer.moments().items()
        )


def test_a_forward_pass_and_an_evaluation_change_nothing_and_know_no_dropout() -> None:
    backbone = backbone_of()
    validation = random_sequences([6, 11], seed=9)
    engine = Engine(backbone)
    task = engine.attach(ONE.job, Sequences(ONE.examples, validation))
    task.adapter.load_pairs(start_values(backbone, ONE))
    state = torch.get_rng_state()
    values = task.adapter.parameters.values.clone()
    outcomes = [engine.forward({task: validation})["one"] for _ in range(2)]
    record = engine.execute(engine.schedule([task.validation_participant()], "eval"))
    (item,) = record.actions[0].items
    assert outcomes[0] == outcomes[1] and outcomes[0].kind == "reference"
    without = attach(engine, replace(ONE, name="without", dropout=0.0))
    assert engine.forward({without: validation})["without"].logprobs == outcomes[0].logprobs, "something was dropped"
    assert outcomes[0].logprobs is not None and len(outcomes[0].logprobs) == item.tokens
    assert item.kind == "eval" and item.logprobs is None and item.loss_sum == outcomes[0].loss_sum
    assert -sum(outcomes[0].logprobs) == pytest.approx(item.loss_sum, rel=1e-12)
    assert torch.equal(torch.get_rng_state(), state)
    assert not task.adapter.parameters.gradient.any() and torch.equal(task.adapter.parameters.values, values)
    # Between two steps, too: the task ends as if nobody had looked.
    steps = []
    while task.step < task.total_steps:
        steps.append(engine.execute(engine.schedule([task.participant()])).actions[-1].step)
        engine.execute(engine.schedule([task.validation_participant()], "eval"))
    assert torch.equal(task.adapter.parameters.values, train(backbone, [ONE])["one"].values)


def test_the_bare_backbone_runs_forward_beside_adapters() -> None:
    """`task` None is the reference model of preference training: the same as an adapter that does nothing."""
    engine, _, two = _pair()
    with torch.no_grad():
        two.adapter.parameters.values.zero_()
    refs = tuple(SequenceRef(index, len(example)) for index, example in enumerate(TWO.examples))
    items = (
        WorkItem("one", "reference", "one/train", (SequenceRef(0, 5),)),
        WorkItem("two", "reference", "two/train", refs),
        WorkItem(None, "reference", "two/train", refs),
    )
    (action,) = engine.execute(RoundSchedule(0, (MicroBatch(0, 0, items),))).actions
    assert action.items[1].logprobs == action.items[2].logprobs
    assert action.items[2].task is None


def _item(
    task: str | None = "one", kind: WorkKind = "train", index: int = 0, length: int = 5, **more: object
) -> WorkItem:
    loss = LossSpec(3) if kind == "train" else None
    item = WorkItem(task, kind, f"{task or 'one'}/train", (SequenceRef(index, length),), loss)
    return replace(item, **more)


def _batch(*items: WorkItem) -> MicroBatch:
    return MicroBatch(0, 0, items)


GOOD = _batch(_item())
ILLEGAL: dict[str, tuple[Action, ...]] = {
    "an unknown task": (GOOD, OptimStep("three")),
    "an unknown task in a batch": (GOOD, _batch(_item("three"))),
    "an unknown source": (GOOD, _batch(_item("two", source="nowhere"))),
    "a sequence that is not there": (GOOD, _batch(_item(index=4))),
    "a negative index": (GOOD, _batch(_item(index=-1, length=21))),
    "another length": (GOOD, _batch(_item(length=7))),
    "a task twice in a micro-batch": (_batch(_item(), _item(index=1, length=17)),),
    "train beside forward": (_batch(_item(), _item("two", "eval", length=8)),),
    "decode beside forward": (_batch(_item("two", "eval", length=8), _item("one", "decode", source="prompts")),),
    "decode of token sequences": (_batch(_item("one", "decode")),),
    "training on a decode source": (_batch(_item(source="prompts", length=4)),),
    "a decode of tokens that are not waiting": (_batch(_item("one", "decode", source="prompts", length=3)),),
    "an unknown slot": (_batch(_item("one", "decode", source="prompts", index=1, length=4)),),
    "the bare backbone training": (_batch(_item(None)),),
    "a train item without a loss": (GOOD, _batch(_item("two", length=8, loss=None))),
    "a denominator of nothing": (_batch(_item(loss=LossSpec(0))),),
    "two denominators": (GOOD, _batch(_item(loss=LossSpec(4)))),
    "a step with nothing to apply": (GOOD, OptimStep("two")),
    "a rate that is none": (GOOD, OptimStep("one", math.nan)),
    "a negative rate": (GOOD, OptimStep("one", -1e-3)),
    "two steps": (GOOD, OptimStep("one"), OptimStep("one")),
    "training after the step": (GOOD, OptimStep("one"), GOOD),
    "an empty micro-batch": (GOOD, _batch()),
    "an item without sequences": (GOOD, _batch(_item("two", sequences=()))),
}


@pytest.mark.parametrize("fault", ILLEGAL)
def test_an_illegal_schedule_is_refused_before_any_of_it_runs(fault: str) -> None:
    engine, one, two = _pair()
    source = DecodeSource({0: DecodeState([5, 6, 7, 8])})
    engine.sources["prompts"] = source
    before = [task.adapter.parameters.values.clone() for task in (one, two)]
    with pytest.raises(StateError):
        engine.execute(RoundSchedule(1, ILLEGAL[fault]))
    for task, values in zip((one, two), before, strict=True):
        assert torch.equal(task.adapter.parameters.values, values)
        assert not task.adapter.parameters.gradient.any() and not task.has_pending and task.step == 0
    assert source.states[0].cached == 0 and source.states[0].logits_V is None
    engine.execute(RoundSchedule(1, (GOOD, OptimStep("one"))))
    assert one.step == 1


def test_a_pass_that_raises_leaves_no_half_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises (memory, a driver): tried again, every task ends as if it had gone well at once."""
    backbone = backbone_of()
    engine = Engine(backbone)
    trials = [replace(ONE, chunk_tokens=20), TWO]
    tasks = [attach(engine, trial) for trial in trials]
    schedule = engine.schedule([task.participant() for task in tasks])
    hidden, calls = backbone.hidden, 0

    def fails_once(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("the second micro-batch does not fit")
        return hidden(*arguments, **options)

    monkeypatch.setattr(backbone, "hidden", fails_once)
    with pytest.raises(PassError, match="MemoryError: the second micro-batch does not fit"):
        engine.execute(schedule)
    assert (tasks[0].step, tasks[1].step) == (0, 1), "the short task had had its step"
    for task in tasks:
        assert not task.has_pending and not task.adapter.parameters.gradient.any()
    monkeypatch.undo()
    steps = run(engine)
    expected = train(backbone, trials)
    assert_same_bits(outcome(tasks[0], steps["one"]), expected["one"])
    assert torch.equal(tasks[1].adapter.parameters.values, expected["two"].values)


def test_gradients_of_many_calls_add_up_to_one_step() -> None:
    engine, one, _ = _pair()
    parts: list[torch.Tensor] = []
    for examples in (ONE.examples[:1], ONE.examples[1:]):
        engine.forward_backward({one: examples})
        parts.append(one.adapter.parameters.gradient.clone())
    assert one.has_pending
    fresh, again, _ = _pair()
    fresh.forward_backward({again: ONE.examples[1:]})
    # summed in another order than one after the other: equal but for rounding
    assert torch.allclose(parts[0] + again.adapter.parameters.gradient, parts[1], rtol=1e-4, atol=1e-7)
    assert engine.optim_step(one).step == 1 and not one.has_pending


def test_sequences_without_a_trained_token_run_and_weigh_nothing() -> None:
    """No row reaches the head; other tasks of the pass are as ever."""
    engine, one, two = _pair()
    silent = TokenSequence(0, np.arange(3, 12, dtype=np.int32), np.zeros(9, bool))
    outcomes = engine.forward_backward({one: [silent]})
    assert (outcomes["one"].loss_sum, outcomes["one"].tokens, outcomes["one"].input_tokens) == (0.0, 0, 1)
    assert not one.adapter.parameters.gradient.any()
    together = engine.forward_backward({one: [silent], two: TWO.examples})
    assert together["one"].tokens == 0 and not one.adapter.parameters.gradient.any()
    alone, _, same = _pair()
    alone.forward_backward({same: TWO.examples})
    assert torch.equal(two.adapter.parameters.gradient, same.adapter.parameters.gradient)


def test_more_trained_rows_than_one_slice_of_the_head() -> None:
    """The head runs in slices of 256 rows: a task whose rows straddle slices has the bits it has alone."""
    backbone = backbone_of("gemma2")
    trials = [
        Trial("long", [200, 150], batch=2, seed=1),
        Trial("longer", [250, 90, 33], batch=3, seed=2),
        Trial("short", [7, 4], batch=2, seed=3),
    ]
    together = train(backbone, trials, chunk_tokens=400)
    for trial in trials:
        assert_same_bits(together[trial.name], train(backbone, [trial], chunk_tokens=400)[trial.name])


@pytest.mark.parametrize(
    ("ids", "message"), [([], "empty"), ([1, 320], "outside"), ([-1], "outside"), ([3] * 257, "257 tokens")]
)
def test_tokens_that_would_break_the_shared_pass_never_enter_it(ids: list[int], message: str) -> None:
    engine, one, _ = _pair()
    bad = TokenSequence(7, np.array(ids, np.int32), np.zeros(len(ids), bool))
    with pytest.raises(DataError, match=message):
        engine.attach(replace(ONE, name="bad").job, Sequences([bad]))
    with pytest.raises(DataError, match=message):
        engine.forward_backward({one: [bad]})
    assert set(engine.tasks) == {"one", "two"} and not one.has_pending


def _decoding(ids: list[int], cached: int = 0) -> DecodeSource:
    return DecodeSource({0: DecodeState(ids, cached)})


def test_a_step_at_a_rate_of_its_own_is_a_step_like_any_other() -> None:
    """It goes through the schedule: refused without a gradient, and equal to the schedule's own at the same rate."""
    engine, one, two = _pair()
    for refused in (one, "two"):
        with pytest.raises(StateError, match="no gradient"):
            engine.optim_step(refused, lr=1e-2)
    assert one.step == two.step == 0
    engine.forward_backward({one: ONE.examples, two: TWO.examples})
    with pytest.raises(StateError, match="learning rate of inf"):
        engine.optim_step(one, lr=math.inf)
    assert one.has_pending, "a refused step has eaten the gradient"
    rate = one.learning_rate()
    assert engine.optim_step(one, lr=rate).lr == rate
    other, same, _ = _pair()
    other.forward_backward({same: ONE.examples})
    other.optim_step(same)
    assert torch.equal(one.adapter.parameters.values, same.adapter.parameters.values)
    still = two.adapter.parameters.values.clone()
    assert engine.optim_step(two, lr=0.0).step == 1 and torch.equal(two.adapter.parameters.values, still)
    with pytest.raises(StateError, match="no gradient"):
        engine.optim_step(two, lr=1e-2)


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_batches_are_checked_before_any_of_them_is_taken_in(call: str) -> None:
    engine, one, two = _pair()
    bad = [TokenSequence(0, np.array([1, 320], np.int32), np.ones(2, bool))]
    sources = dict(engine.sources)
    for batches, error in (
        ({one: ONE.examples, two: bad}, DataError),
        ({one: ONE.examples, "nobody": TWO.examples}, StateError),
        ({one: ONE.examples, "one": ONE.examples[:1]}, StateError),
        ({one: ONE.examples, two: []}, DataError),
    ):
        with pytest.raises(error):
            getattr(engine, call)(batches)
        assert engine.sources == sources and not one.has_pending
    assert set(getattr(engine, call)({one: ONE.examples, "two": TWO.examples})) == {"one", "two"}
    assert engine.sources == sources


def test_a_source_is_lent_once_and_given_back() -> None:
    engine, _, _ = _pair()
    sources = dict(engine.sources)
    with (
        pytest.raises(StateError, match="in use"),
        engine.lending({"new": _decoding([1]), "one/train": _decoding([2])}),
    ):
        pass
    assert engine.sources == sources


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (_decoding([5, 320]), r"outside 0\.\.319"),
        (_decoding([5, 6, -1], 1), "outside"),
        (_decoding([5] * 257), "257 tokens, the base model takes 256"),
        (_decoding([5] * 257, 256), "257 tokens"),
        ([TokenSequence(0, np.array([320], np.int32), np.zeros(1, bool))], "outside"),
    ],
    ids=["id", "new id", "position", "new position", "reference"],
)
def test_tokens_of_any_source_are_checked_before_a_pass(source: object, message: str) -> None:
    engine, _, _ = _pair()
    kind: WorkKind = "decode" if isinstance(source, DecodeSource) else "reference"
    refs = (source.reference(0),) if isinstance(source, DecodeSource) else (SequenceRef(0, 1),)
    with engine.lending({"any": source}), pytest.raises(DataError, match=message):  # type: ignore[dict-item]
        engine.execute(RoundSchedule(0, (GOOD, _batch(WorkItem("one", kind, "any", refs)))))
    assert not engine.task("one").has_pending, "the pass before it has run"


def test_generating_stops_at_the_last_position_and_may_be_nested() -> None:
    engine, _, _ = _pair()
    request = Request("one", [5] * 250, frozenset(), max_new_tokens=6)
    inner: list[list[int]] = []

    def hear(place: int, token: int) -> None:
        if not inner:
            inner.extend(generate(engine, [request]))

    assert generate(engine, [request], on_token=hear) == inner
    with pytest.raises(DataError, match="takes 256"):
        generate(engine, [replace(request, max_new_tokens=8)])
    assert not [name for name in engine.sources if "decode" in name]
