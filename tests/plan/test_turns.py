"""A round's turns by properties: the template's order, the same messages in one order at both ends, no deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.pipeline import make_template
from muxtune.plan.turns import Turn, plain_turns, stage_turns
from muxtune.plan.types import Action, LossSpec, MicroBatch, OptimStep, RoundSchedule, SequenceRef, WorkItem

_LOSS = LossSpec(4)


def _batch(htask: int, chunk: int, *, kind: str = "train", refs: Sequence[SequenceRef] = (), **how: bool) -> MicroBatch:
    refs = refs or (SequenceRef(chunk, 8),)
    items = (WorkItem(f"t{htask}", kind, f"t{htask}/train", tuple(refs), _LOSS),)  # type: ignore[arg-type]
    return MicroBatch(htask, chunk, items, **how)  # type: ignore[arg-type]


def _round(passes: Sequence[int]) -> RoundSchedule:
    """Of hTasks of so many passes each, one after another."""
    actions: list[Action] = []
    for htask, count in enumerate(passes):
        actions += [_batch(htask, chunk) for chunk in range(count)]
        actions.append(OptimStep(f"t{htask}"))
    return RoundSchedule(1, tuple(actions))


@st.composite
def _mixed(draw: st.DrawFn) -> RoundSchedule:
    """Passes of several tasks in any order, of all kinds, with a step here and there and several of a task."""
    actions: list[Action] = []
    running = set()
    for number in range(draw(st.integers(1, 9))):
        htask = draw(st.integers(0, 2))
        kind = draw(st.sampled_from(["train", "carry", "eval"]))
        cut = draw(st.booleans()) or kind == "carry"
        refs = (SequenceRef(0, 4, 4, 16),) if cut else ()
        actions.append(_batch(htask, number, kind=kind, refs=refs, recompute=kind == "train" and draw(st.booleans())))
        running.add(htask)
        if draw(st.booleans()):
            actions.append(OptimStep(f"t{htask}"))
    if draw(st.booleans()):
        actions.insert(0, OptimStep("early"))
    return RoundSchedule(1, tuple(actions))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 4))
def test_it_is_the_template_of_the_same_hTasks(passes: list[int], stages: int) -> None:
    schedule = _round(passes)
    template = make_template([[True] * count for count in passes], [[one] for one in range(len(passes))], stages)
    for stage in range(stages):
        found = []
        for turn in stage_turns(schedule, stages, stage):
            action = schedule.actions[turn.index]
            told = (action.htask, action.chunk) if isinstance(action, MicroBatch) else (int(action.task[1:]), None)
            found.append((turn.direction, *told))
        assert found == [
            (action.direction, action.htask, action.chunk if action.direction != "step" else None)
            for action in template.actions(stage)
        ]


@given(_mixed(), st.integers(1, 4), st.booleans())
def test_everything_is_done_once_and_in_an_order_that_a_stage_can_keep(
    schedule: RoundSchedule, stages: int, plain: bool
) -> None:
    for stage in range(stages):
        turns = plain_turns(schedule) if plain else stage_turns(schedule, stages, stage)
        expected = set()
        for index, action in enumerate(schedule.actions):
            ways = ("forward", "backward") if isinstance(action, MicroBatch) else ("step",)
            expected |= {(way, index) for way in ways}
        assert sorted((turn.direction, turn.index) for turn in turns) == sorted(expected)
        place = {(turn.direction, turn.index): at for at, turn in enumerate(turns)}
        closing = {step: turn for turn in turns for step in turn.closes}
        for index, action in enumerate(schedule.actions):
            if isinstance(action, MicroBatch):
                assert place["forward", index] < place["backward", index]
                continue
            assert place[closing[index].direction, closing[index].index] <= place["step", index]
            for other, batch in enumerate(schedule.actions):
                if isinstance(batch, MicroBatch) and batch.items[0].task == action.task:
                    way = "backward" if other < index else "forward"
                    assert (place[way, other] < place["step", index]) == (other < index)


@given(_mixed(), st.integers(2, 4), st.booleans())
def test_both_ends_of_a_link_name_its_messages_in_the_same_order(
    schedule: RoundSchedule, stages: int, plain: bool
) -> None:
    """Forth: rows, and what steps came to; back: what passes came to, and what closes with them."""
    by_stage = [plain_turns(schedule) if plain else stage_turns(schedule, stages, stage) for stage in range(stages)]
    for left, right in pairwise(by_stage):
        assert _forth(left) == _forth(right)
        assert _back(left) == _back(right)


@given(_mixed(), st.integers(1, 4), st.booleans())
def test_no_deadlock_whoever_is_slow(schedule: RoundSchedule, stages: int, plain: bool) -> None:
    """Stages run their own turns and wait for what they are sent: all of them come to the end."""
    left = [list(plain_turns(schedule) if plain else stage_turns(schedule, stages, one)) for one in range(stages)]
    done: set[tuple[int, str, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage, turns in enumerate(left):
            if turns and _needs(turns[0], stage, stages) <= done:
                done |= _gives(turns.pop(0), stage)
                moved = True
    assert not any(left)


def _forth(turns: Sequence[Turn]) -> list[tuple[str, int]]:
    return [(turn.direction, turn.index) for turn in turns if turn.direction != "backward"]


def _back(turns: Sequence[Turn]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(turn.direction, turn.index, turn.closes) for turn in turns if turn.direction == "backward" or turn.closes]


def _needs(turn: Turn, stage: int, stages: int) -> set[tuple[int, str, int]]:
    found = set()
    if stage > 0 and turn.direction != "backward":
        found.add((stage - 1, turn.direction, turn.index))
    if stage < stages - 1 and turn.direction == "backward":
        found.add((stage + 1, "backward", turn.index))
    if turn.direction == "step" and turn.closes:
        found = {(stage + 1, "closed", turn.index)} if stage < stages - 1 else set()
    return found


def _gives(turn: Turn, stage: int) -> set[tuple[int, str, int]]:
    found = {(stage, turn.direction, turn.index)}
    return found | {(stage, "closed", turn.index)} if turn.direction == "step" and turn.closes else found


def test_a_piece_that_only_goes_forward_awaits_those_that_train() -> None:
    """Two rounds of pieces of one task: the second's carry begins when the first's last piece is back."""
    piece = (SequenceRef(0, 4, 0, 16),)
    actions = (_batch(0, 0, refs=piece), _batch(1, 0), _batch(0, 1, kind="carry", refs=piece))
    turns = [(turn.direction, turn.index) for turn in stage_turns(RoundSchedule(1, actions), 3, 0)]
    assert turns.index(("backward", 0)) < turns.index(("forward", 2))
    assert turns.index(("forward", 1)) < turns.index(("backward", 0))
