"""Loads of jobs: what the engine will run, told from data and spec alone; and what it did run, told from its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from muxtune.engine.engine import Engine
from muxtune.engine.loads import LOOKED_AT, load_of, load_of_task, members_of, points_of, predicted_s
from muxtune.engine.task import Sequences, Task
from muxtune.plan.cost import CostModel, padded_rows
from muxtune.plan.loads import BARE, Span, TaskLoad, label_of, passes
from muxtune.plan.round import Participant
from muxtune.plan.types import Action, MicroBatch, OptimStep, RoundRecord, RoundSchedule, SequenceRef
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import read_peft
from tests.engine.build import backbone_of
from tests.plan.tables import table
from tests.sequences import random_sequences

LENGTHS = (9, 30, 4, 17, 61, 12, 25, 40, 7, 33, 21, 5)


def _job(peft: object = "lora", *, batch: int = 2, method: str = "sft", **keys: object) -> JobSpec:
    keys = {"max_steps": 50, **keys}
    return JobSpec(
        name="one",
        datasets=["unread.jsonl"],
        peft=read_peft(peft),
        method=method,
        per_device_train_batch_size=batch,
        **keys,
    )


def _attached(
    job: JobSpec, chunk_tokens: int, lengths: Sequence[int] = LENGTHS, *, keep_tokens: int = 0
) -> tuple[Engine, Task]:
    engine = Engine(backbone_of(), chunk_tokens=chunk_tokens, keep_tokens=keep_tokens)
    return engine, engine.attach(job, Sequences(random_sequences(lengths, seed=3)))


def _round(engine: Engine, task: Task) -> RoundRecord:
    participant = task.participant()
    engine.refer([participant])
    return engine.execute(engine.schedule([participant]))


PREFIX, PROMPT = ({"type": f"{kind}_tuning", "num_virtual_tokens": 5} for kind in ("prefix", "prompt"))


@pytest.mark.parametrize("keep_tokens", [0, 40, 10_000])
@pytest.mark.parametrize("chunk_tokens", [512, 32, 16])
@pytest.mark.parametrize("peft", ["lora", PREFIX, PROMPT], ids=["lora", "prefix", "prompt"])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_load_is_what_the_engine_runs(method: str, peft: object, chunk_tokens: int, keep_tokens: int) -> None:
    """Over the steps that are looked at, the middle one is the load; each pass has the rows and the trained tokens of
    its chunk, or none where it goes on from what was kept; and no step has more than the bounds."""
    engine, task = _attached(_job(peft, method=method), chunk_tokens, keep_tokens=keep_tokens)
    load = load_of_task(task, engine.backbone.places, keep_tokens=keep_tokens)
    records = [_round(engine, task) for _ in range(LOOKED_AT)]
    ran = [_passes(record) for record in sorted(records, key=lambda one: _rows(one, task.job.peft.virtual_rows))]
    rows = [0 if chunk.resumes else int(padded_rows(np.float64(chunk.rows))) for chunk in load.chunks]
    expected = [(own, chunk.trained, chunk.trains) for own, chunk in zip(rows, load.chunks, strict=True)]
    assert expected == ran[LOOKED_AT // 2]
    most = max(rows for passes in ran for rows, _, _ in passes)
    assert most <= padded_rows(np.float64(load.widest))
    assert load.steps == 50 and task.step == LOOKED_AT
    assert load_of_task(task, engine.backbone.places).steps == 50 - LOOKED_AT


def _passes(record: RoundRecord) -> list[tuple[int, int, bool]]:
    """Rows, trained rows and whether it trains, of each pass."""
    found = []
    for action, ran in zip(record.schedule.actions, record.actions, strict=True):
        if isinstance(action, MicroBatch):
            trained = sum(item.tokens for item in ran.items) if action.trains else _scored(action)
            found.append((ran.rows, trained, action.trains))
    return found


def _rows(record: RoundRecord, virtual: int) -> int:
    """Padding not counted."""
    batches = [action for action in record.schedule.actions if isinstance(action, MicroBatch)]
    refs = [ref for batch in batches for item in batch.items for ref in item.sequences]
    return sum(ref.length + (virtual if ref.start == 0 else 0) for ref in refs)


def _scored(batch: MicroBatch) -> int:
    (item,) = batch.items
    if item.kind == "carry":
        return 0
    sequences = random_sequences(LENGTHS, seed=3)
    return sum(int(sequences[ref.index].mask[ref.start + 1 : ref.stop + 1].sum()) for ref in item.sequences)


def test_numbers_of_the_adapter_are_the_spec_s_and_the_middle_step_counts() -> None:
    backbone = backbone_of()
    job = _job({"type": "lora", "r": 3, "lora_dropout": 0.5}, shuffle=False)
    load = load_of(job, random_sequences(LENGTHS, seed=3), 512, backbone.places)
    assert (load.name, load.adapter) == ("one", "lora+dropout")
    assert load.parameters == job.peft.parameters(backbone.places)
    assert load.state_bytes == 16 * load.parameters and load.points == len(backbone.attach_points)
    assert [chunk.rows for chunk in load.chunks] == [40], "the steps have 39, 21, 73, 65 and 40"


def test_the_bounds_hold_the_longest_sequences_whole_or_cut() -> None:
    places = backbone_of().places
    data = random_sequences(LENGTHS, seed=3)
    whole, cut = (load_of(_job(PREFIX), data, budget, places) for budget in (512, 32))
    assert (whole.widest, whole.carried) == (61 + 40, 0)
    assert (cut.widest, cut.carried) == (32, 61 + 5)
    pairs, parted = (load_of(_job(PROMPT, method="dpo", batch=1), data, budget, places) for budget in (70, 40))
    assert (pairs.widest, pairs.carried) == (70, 0), "the longest pair, 61 + 12 and 10 virtual rows, is parted, not cut"
    assert (parted.widest, parted.carried) == (40, 2 * (61 + 5))


@pytest.mark.parametrize(("peft", "lead"), [("lora", 0), (PREFIX, 5), (PROMPT, 5)], ids=["lora", "prefix", "prompt"])
def test_the_longest_sequence_bounds_what_rows_see_whatever_step_is_the_typical_one(peft: object, lead: int) -> None:
    """The steps that are looked at are short; the long sequence comes later."""
    data = random_sequences([5] * 20 + [61], seed=3)
    load = load_of(_job(peft, batch=1, shuffle=False), data, 512, backbone_of().places)
    assert max(chunk.longest for chunk in load.chunks) == 5 + lead and load.longest == 61 + lead


def test_spans_see_what_came_before_them() -> None:
    places = backbone_of().places
    load = load_of(_job(PREFIX, batch=1), random_sequences([40], seed=0), 16, places)
    assert [(chunk.spans, chunk.trains) for chunk in load.chunks] == [
        ((Span(16, 21),), False),
        ((Span(16, 37),), False),
        ((Span(8, 45),), True),
        ((Span(16, 37),), True),
        ((Span(16, 21),), True),
    ]
    virtual = load_of(_job(PROMPT, batch=1), random_sequences([20], seed=0), 16, places)
    assert [chunk.spans for chunk in virtual.chunks] == [(Span(16, 16),), (Span(9, 25),), (Span(16, 16),)]


def test_fewer_targets_are_fewer_points() -> None:
    places = backbone_of().places
    two = read_peft({"type": "lora", "target_modules": ["q_proj", "v_proj"]})
    norms = read_peft("ln_tuning")
    assert points_of(two, places) == 4 and points_of(norms, places) == 5  # type: ignore[arg-type]
    assert label_of(read_peft("houlsby")) == "houlsby"  # type: ignore[arg-type]


def test_what_ran_is_predicted_action_by_action() -> None:
    engine, task = _attached(_job(method="dpo"), 512)
    loads = {task.name: load_of_task(task, engine.backbone.places)}
    participant = task.participant()
    referred = engine.refer([participant])
    record = engine.execute(engine.schedule([participant]))
    cost = CostModel(table(16))
    predicted = predicted_s(record.schedule, cost, engine.tasks, loads, engine.sources)
    batch, step = record.schedule.actions
    assert isinstance(batch, MicroBatch) and isinstance(step, OptimStep)
    ((load, chunk),) = members_of(batch, engine.tasks, loads, engine.sources)
    assert load == loads[task.name] and chunk.compared == chunk.trained > 0
    assert predicted == [cost.pass_cost([(load, chunk)]).total_s(cost.layers), cost.step_s(load)]
    assert referred is not None
    (bare,) = referred.schedule.actions
    assert isinstance(bare, MicroBatch)
    lent = {bare.items[0].source: [engine.sources[task.train_source][ref.index] for ref in _refs(participant)]}
    ((nobody, scored),) = members_of(bare, engine.tasks, {}, lent)
    assert isinstance(nobody, TaskLoad) and nobody.adapter == BARE and not scored.trains and scored.compared == 0


def test_a_pass_that_resumes_is_predicted_without_its_forward_part() -> None:
    engine, task = _attached(_job(batch=1), 16, [40], keep_tokens=32)
    loads = {task.name: load_of_task(task, engine.backbone.places, keep_tokens=32)}
    record = _round(engine, task)
    cost = CostModel(table(16))
    predicted = predicted_s(record.schedule, cost, engine.tasks, loads, engine.sources)
    resumed = [place for place, action in enumerate(record.schedule.actions) if getattr(action, "resumes", False)]
    assert len(resumed) == sum(chunk.resumes for chunk in loads[task.name].chunks) == 2
    again = predicted_s(
        RoundSchedule(0, tuple(_plain(action) for action in record.schedule.actions)),
        cost, engine.tasks, loads, engine.sources,
    )  # fmt: skip
    saved = [one - other for one, other in zip(again, predicted, strict=True)]
    assert [place for place, seconds in enumerate(saved) if seconds > 0] == resumed
    assert all(seconds >= cost.layers * 1e-3 for seconds in saved if seconds)


def test_passes_of_fused_loads_are_those_of_a_round_of_their_tasks() -> None:
    """Three pieces and a tail, two and a tail, and a task of two whole chunks."""
    engine = Engine(backbone_of(), chunk_tokens=16, keep_tokens=10_000)
    for name, lengths in (("deep", [56]), ("less", [40]), ("whole", [12, 14])):
        job = _job(batch=len(lengths), shuffle=False).model_copy(update={"name": name})
        engine.attach(job, Sequences(random_sequences(lengths, seed=3)))
    tasks = list(engine.tasks.values())
    loads = [load_of_task(task, engine.backbone.places, keep_tokens=10_000) for task in tasks]
    schedule = engine.schedule([task.participant() for task in tasks])
    ran = [
        [(item.task, item.tokens, action.resumes) for item in action.items]
        for action in schedule.actions
        if isinstance(action, MicroBatch)
    ]
    assert [[(load.name, chunk.rows, chunk.resumes) for load, chunk in one] for one in passes(loads)] == ran


def _plain(action: Action) -> Action:
    return replace(action, keep=False) if isinstance(action, MicroBatch) else action


def _refs(participant: Participant) -> list[SequenceRef]:
    return [ref for chunk in participant.chunks for ref in chunk]
