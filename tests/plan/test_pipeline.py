"""Templates by properties: all work once, legal on every stage, no deadlock, and the 1F1B that everyone knows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from muxtune.plan.pipeline import Slot, StageAction, Template, make_template
from tests.plan.pipelines import Case, cases


def _expected(case: Case) -> Counter[StageAction]:
    """What each stage should do."""
    found: Counter[StageAction] = Counter()
    for iteration in range(case.iterations):
        for htask, passes in enumerate(case.trains):
            found[StageAction("step", htask, len(passes) - 1, iteration)] += 1
            for chunk, trains in enumerate(passes):
                found[StageAction("forward", htask, chunk, iteration)] += 1
                found[StageAction("backward", htask, chunk, iteration)] += trains
    return found


@given(cases())
def test_every_stage_does_everything_once(case: Case) -> None:
    for stage in range(case.stages):
        assert Counter(case.template.actions(stage)) == _expected(case)


@given(cases())
def test_each_stage_keeps_what_a_task_asks_for(case: Case) -> None:
    """Passes in order, back after forward, a step after the last back and before the next iteration, and no carried
    pass while a trained one of the same hTask is out."""
    for stage in range(case.stages):
        actions = case.template.actions(stage)
        place = {action: at for at, action in enumerate(actions)}
        for htask, passes in enumerate(case.trains):
            own = [action for action in actions if action.htask == htask]
            for direction in ("forward", "backward"):
                run = [(action.iteration, action.chunk) for action in own if action.direction == direction]
                assert run == sorted(run)
            out = 0
            for action in own:
                if action.direction == "step":
                    assert out == 0
                elif passes[action.chunk]:
                    out += 1 if action.direction == "forward" else -1
                else:
                    assert out == 0
                if action.direction == "backward":
                    forward = StageAction("forward", htask, action.chunk, action.iteration)
                    assert place[forward] < place[action]
                if action.direction == "forward" and action.chunk == 0 and action.iteration:
                    step = StageAction("step", htask, len(passes) - 1, action.iteration - 1)
                    assert place[step] < place[action]


@given(cases())
def test_a_stage_holds_no_more_slots_than_1f1b_warms_up_with(case: Case) -> None:
    for stage in range(case.stages):
        held = most = 0
        waiting: list[set[tuple[int, int, int]]] = []
        for slot in case.template.of_stage(stage):
            keys = {(one.htask, one.chunk, one.iteration) for one in slot.actions if case.trains[one.htask][one.chunk]}
            if slot.direction == "forward" and keys:
                waiting.append(keys)
                held += 1
            elif slot.direction == "backward":
                assert waiting.pop(0) == keys, "slots come back whole, in the order in which they went"
                held -= 1
            most = max(most, held)
        assert most <= case.stages - stage and held == 0


@given(cases())
def test_all_stages_have_one_order_of_messages(case: Case) -> None:
    """What is sent first is awaited first: a link needs no tags."""
    for direction in ("forward", "backward"):
        orders = [
            [slot.actions for slot in case.template.of_stage(stage) if slot.direction == direction]
            for stage in range(case.stages)
        ]
        assert all(order == orders[0] for order in orders)


def _needs(case: Case, stage: int, action: StageAction) -> set[tuple[int, StageAction]]:
    """What must have run elsewhere."""
    if action.direction == "forward":
        return {(stage - 1, action)} if stage else set()
    if action.direction == "backward":
        return {(stage + 1, action)} if stage < case.stages - 1 else set()
    return {(0, StageAction("backward", action.htask, action.chunk, action.iteration))}


@given(cases())
def test_stages_that_wait_for_what_they_receive_never_wait_for_ever(case: Case) -> None:
    lists = [list(case.template.actions(stage)) for stage in range(case.stages)]
    done: set[tuple[int, StageAction]] = set()
    while any(lists):
        ready = [stage for stage, rest in enumerate(lists) if rest and _needs(case, stage, rest[0]) <= done]
        assert ready, "deadlock"
        for stage in ready:
            done.add((stage, lists[stage].pop(0)))


@given(cases())
def test_the_order_of_all_is_one_in_which_nothing_waits(case: Case) -> None:
    done: set[tuple[int, StageAction]] = set()
    for slot in case.template.order:
        for action in slot.actions:
            assert _needs(case, slot.stage, action) <= done
        done.update((slot.stage, action) for action in slot.actions)


def _text(template: Template, stage: int) -> str:
    return " ".join(f"{one.direction[0]}{one.chunk}" for one in template.actions(stage) if one.direction != "step")


def test_one_htask_is_plain_1f1b() -> None:
    template = make_template([[True] * 5], [[0]], 3)
    assert [_text(template, stage) for stage in range(3)] == [
        "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4",
        "f0 f1 b0 f2 b1 f3 b2 f4 b3 b4",
        "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4",
    ]


def test_one_device_runs_pass_after_pass_and_steps_at_once() -> None:
    template = make_template([[True, True], [False, True]], [[0], [1]], 1)
    found = [(one.direction[0], one.htask, one.chunk) for one in template.actions(0)]
    assert found == [
        *(("f", 0, 0), ("b", 0, 0), ("f", 0, 1), ("b", 0, 1), ("s", 0, 1)),
        *(("f", 1, 0), ("f", 1, 1), ("b", 1, 1), ("s", 1, 1)),
    ]


def test_members_of_a_bucket_alternate_and_together_they_share_slots() -> None:
    trains = [[True, True], [True], [True]]
    apart = [one.htask for one in make_template(trains, [[0, 2], [1]], 1).actions(0) if one.direction == "forward"]
    assert apart == [0, 2, 0, 1]
    slots = make_template(trains, [[0, 2], [1]], 1, together=True).of_stage(0)
    run = [[(one.htask, one.chunk) for one in slot.actions] for slot in slots if slot.direction == "forward"]
    assert run == [[(0, 0), (2, 0)], [(0, 1)], [(1, 0)]]


def test_a_member_with_fewer_passes_takes_the_slots_that_have_least() -> None:
    trains = [[True], [True] * 3, [True], [True] * 2]
    slots = make_template(trains, [[0, 1, 2, 3]], 1, together=True, pass_s=[3, 1, 1, 2]).of_stage(0)
    run = [[(one.htask, one.chunk) for one in slot.actions] for slot in slots if slot.direction == "forward"]
    assert run == [[(1, 0), (2, 0), (3, 0)], [(1, 1), (3, 1)], [(0, 0), (1, 2)]]


def test_a_step_does_not_keep_a_stage_waiting() -> None:
    """On stage 1 of 2 the norm arrives one slot after its own last backward, if there is anything to do meanwhile."""
    template = make_template([[True], [True]], [[0], [1]], 2)
    kinds = [(one.direction, one.htask) for one in template.actions(1)]
    assert kinds.index(("step", 0)) == kinds.index(("backward", 1)) + 1
    alone = make_template([[True]], [[0]], 2, iterations=2)
    kinds_alone = [(one.direction, one.iteration) for one in alone.actions(1)]
    assert kinds_alone == [(kind, turn) for turn in (0, 1) for kind in ("forward", "backward", "step")]


@pytest.mark.parametrize(
    ("trains", "buckets"), [([[True]], [[0], [0]]), ([[True], [True]], [[1]]), ([[True, False]], [[0]]), ([[]], [[0]])]
)
def test_what_is_no_plan_is_refused(trains: list[list[bool]], buckets: list[list[int]]) -> None:
    with pytest.raises(AssertionError):
        make_template(trains, buckets, 2)


def test_every_slot_is_of_one_direction() -> None:
    template = make_template([[False, True], [True, True]], [[0, 1]], 2, together=True, iterations=2)
    assert all(len({one.direction for one in slot.actions}) == 1 for slot in template.order)
    mixed = next(slot for slot in template.order if slot.direction == "backward")
    assert mixed == Slot(mixed.stage, (StageAction("backward", 1, 0, 0),)), "what only goes forward does not come back"
    assert not any(before == after for before, after in pairwise(template.order))
