"""Rounds whose hTasks take turns: the same actions, each task's in its own order; slots are passes of other tasks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.interleave import interleaved, slots
from muxtune.plan.legal import require_legal
from muxtune.plan.round import Participant, derive_round
from muxtune.plan.types import Action, MicroBatch, OptimStep, RoundSchedule, SequenceRef, tasks_of


@st.composite
def rounds(draw: st.DrawFn) -> RoundSchedule:
    """Tasks of some chunks, some of which carry a cut sequence."""
    participants = [_participant(draw, f"t{number}") for number in range(draw(st.integers(1, 6)))]
    return derive_round(
        1,
        participants,
        policy="fuse-all",
        fuse_tokens=draw(st.integers(1, 60)),
        keep_tokens=draw(st.sampled_from([0, 1000])),
    )


def _participant(draw: st.DrawFn, name: str) -> Participant:
    whole = [(SequenceRef(index, draw(st.integers(1, 20))),) for index in range(draw(st.integers(1, 3)))]
    if not draw(st.booleans()):
        return Participant(name, f"{name}/train", tuple(whole))
    head, tail = SequenceRef(9, 6, 0, 10), SequenceRef(9, 4, 6, 10)
    return Participant(name, f"{name}/train", ((head,), (tail,), (head,), *whole), carried=frozenset({0}))


@given(rounds(), st.integers(1, 4))
def test_the_same_actions_and_each_tasks_in_its_own_order(schedule: RoundSchedule, together: int) -> None:
    found = interleaved(schedule, together)
    assert sorted(map(repr, found.actions)) == sorted(map(repr, schedule.actions))
    for task in {task for action in schedule.actions for task in tasks_of(action)}:
        assert _of(found, task) == _of(schedule, task)
    require_legal(found, [])
    if together == 1:
        assert found == schedule


@given(rounds(), st.integers(1, 4))
def test_slots_are_passes_that_train_each_of_other_tasks(schedule: RoundSchedule, together: int) -> None:
    actions = interleaved(schedule, together).actions
    found = slots(actions)
    assert [index for slot in found for index in slot] == list(range(len(actions)))
    for slot in found:
        own = [actions[index] for index in slot]
        if len(own) > 1:
            assert all(isinstance(one, MicroBatch) and one.trains and not one.keep for one in own)
            tasks = [task for one in own for task in tasks_of(one)]
            assert len(tasks) == len(set(tasks))
    for one, other in pairwise(found):  # no two of them could be one
        together_ = [actions[index] for index in (*one, *other)]
        tasks = [task for action in together_ for task in tasks_of(action)]
        alike = all(isinstance(action, MicroBatch) and action.trains and not action.keep for action in together_)
        assert not alike or len(tasks) > len(set(tasks))


def test_passes_take_turns_and_steps_follow_the_slot() -> None:
    ref = SequenceRef(0, 5)
    participants = [Participant("a", "a/train", ((ref,), (ref,))), *(Participant(n, n, ((ref,),)) for n in "bc")]
    schedule = interleaved(derive_round(1, participants, policy="sequential", fuse_tokens=1), 2)
    assert [_name(action) for action in schedule.actions] == ["a0", "b0", "b!", "a1", "a!", "c0", "c!"]
    assert slots(schedule.actions) == [range(2), *(range(index, index + 1) for index in range(2, 7))]


def _name(action: Action) -> str:
    (task,) = tasks_of(action)
    return f"{task}!" if isinstance(action, OptimStep) else f"{task}{action.chunk}"


def _of(schedule: RoundSchedule, task: str | None) -> list[Action]:
    return [action for action in schedule.actions if task in tasks_of(action)]
