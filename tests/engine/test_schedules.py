"""Whatever legal schedule brings a task's chunks in their order, recomputed or not, the task gets the same bits."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from muxtune.engine.engine import Engine
from muxtune.models.backbone import Backbone
from muxtune.plan.align import align
from muxtune.plan.legal import require_legal
from muxtune.plan.round import Participant
from muxtune.plan.types import Action, LossSpec, MicroBatch, OptimStep, RoundSchedule, WorkItem
from tests.engine.build import Trained, Trial, assert_same_bits, attach, backbone_of, train

TRIALS = (
    Trial("one", [5, 17, 9, 3], steps=1, dropout=0.2, chunk_tokens=17, seed=1),
    Trial("two", [8, 13, 4], batch=3, steps=1, r=8, chunk_tokens=13, seed=2),
    Trial("three", [20, 2], batch=2, steps=1, r=3, targets=("q_proj", "up_proj"), chunk_tokens=1, seed=3),
)


@cache
def _backbone() -> Backbone:
    return backbone_of("llama", layers=1)


@cache
def _sequentially() -> dict[str, Trained]:
    return train(_backbone(), TRIALS, policy="sequential")


@st.composite
def _schedules(draw: st.DrawFn) -> list[list[str]]:
    """Micro-batches as lists of task names: each task as often as it has chunks, in any company and any order."""
    left = {trial.name: len(align(trial.lengths, trial.chunk_tokens or 0)) for trial in TRIALS}
    batches: list[list[str]] = []
    while any(left.values()):
        waiting = [name for name, chunks in left.items() if chunks]
        batch = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        for name in batch:
            left[name] -= 1
        batches.append(batch)
    return batches


def _items(participant: Participant) -> list[WorkItem]:
    loss = LossSpec(participant.denominator)
    return [
        WorkItem(participant.task, "carry", participant.source, chunk)
        if number in participant.carried
        else WorkItem(participant.task, "train", participant.source, chunk, loss)
        for number, chunk in enumerate(participant.chunks)
    ]


@given(_schedules(), st.data())
@settings(max_examples=15)
def test_any_legal_schedule_gives_the_bits_of_the_sequential_one(batches: list[list[str]], data: st.DataObject) -> None:
    engine = Engine(_backbone())
    tasks = {trial.name: attach(engine, trial) for trial in TRIALS}
    waiting = {name: _items(task.participant()) for name, task in tasks.items()}
    actions: list[Action] = []
    due: list[str] = []
    for names in batches:
        items = [waiting[name].pop(0) for name in names]
        for kind in ("carry", "train"):  # a pass trains or it does not
            if own := tuple(item for item in items if item.kind == kind):
                again = kind == "train" and data.draw(st.booleans())  # recomputed, or not
                actions.append(MicroBatch(0, len(actions), own, recompute=again))
        due += [name for name in names if not waiting[name]]
        while due and data.draw(st.booleans()):  # a step may come at once or as late as one likes
            actions.append(OptimStep(due.pop()))
    schedule = RoundSchedule(1, (*actions, *map(OptimStep, due)))
    require_legal(schedule)
    record = engine.execute(schedule)
    outcomes = {action.step.task: action.step for action in record.actions if action.step is not None}
    for name, task in tasks.items():
        expected = _sequentially()[name]
        assert_same_bits(
            Trained(
                [outcomes[name].loss],
                [outcomes[name].grad_norm],
                values=task.adapter.parameters.values,
                moments=task.optimizer.moments(),
            ),
            expected,
        )
