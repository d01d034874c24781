"""Rounds by properties: all work once, in each task's own order, within the memory asked for, legal and frozen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import StateError
from muxtune.plan.align import align
from muxtune.plan.legal import require_legal
from muxtune.plan.round import Participant, derive_round, fuse
from muxtune.plan.types import MicroBatch, OptimStep, Plan, RoundSchedule, SequenceRef, WorkItem
from muxtune.spec.policy import Policy
from tests.plan.rounds import participants, plans

POLICIES = st.sampled_from(["sequential", "fuse-all", "padded", "muxtune"])
BUDGETS = st.integers(1, 300)


KEPT = st.just(0) | st.integers(0, 400)


def _round(members: list[Participant], policy: Policy, fuse_tokens: int, keep_tokens: int = 0) -> RoundSchedule:
    return derive_round(3, members, policy=policy, fuse_tokens=fuse_tokens, keep_tokens=keep_tokens)


def _items(schedule: RoundSchedule) -> list[WorkItem]:
    return [item for action in schedule.actions if isinstance(action, MicroBatch) for item in action.items]


@given(participants(), POLICIES, BUDGETS, KEPT)
def test_every_chunk_runs_once_in_its_tasks_order_and_each_task_steps_once_after_its_last(
    members: list[Participant], policy: Policy, fuse_tokens: int, keep_tokens: int
) -> None:
    schedule = _round(members, policy, fuse_tokens, keep_tokens)
    for member in members:
        own = [item for item in _items(schedule) if item.task == member.task]
        assert tuple(item.sequences for item in own) == member.chunks
        kinds = ["carry" if place in member.carried else "train" for place in range(len(own))]
        assert [(item.source, item.kind) for item in own] == [(member.source, kind) for kind in kinds]
        assert {item.loss.denominator for item in own if item.loss} <= {member.denominator}
        steps = [place for place, action in enumerate(schedule.actions) if action == OptimStep(member.task or "")]
        ran = [
            place
            for place, action in enumerate(schedule.actions)
            if isinstance(action, MicroBatch) and any(item.task == member.task for item in action.items)
        ]
        assert len(steps) == bool(member.chunks)
        assert not steps or steps[0] > ran[-1]


@given(participants(), POLICIES, BUDGETS, KEPT)
def test_a_round_is_legal(members: list[Participant], policy: Policy, fuse_tokens: int, keep_tokens: int) -> None:
    require_legal(_round(members, policy, fuse_tokens, keep_tokens))


@given(participants(), POLICIES, BUDGETS, KEPT)
def test_what_is_kept_at_a_time_stays_within_its_rows_and_trains_last_in_first_out(
    members: list[Participant], policy: Policy, fuse_tokens: int, keep_tokens: int
) -> None:
    held: list[MicroBatch] = []
    for action in _round(members, policy, fuse_tokens, keep_tokens).actions:
        if isinstance(action, MicroBatch) and action.resumes:
            assert action.pieces == held[-1].pieces and action.width == held.pop().width
        elif isinstance(action, MicroBatch) and action.keep:
            held.append(action)
            assert sum(max(batch.tokens, _padded(batch)) for batch in held) <= keep_tokens
    assert not held


def _padded(batch: MicroBatch) -> int:
    return batch.width * sum(len(item.sequences) for item in batch.items)


@given(participants(), POLICIES, BUDGETS)
def test_with_enough_rows_all_that_is_carried_is_kept_but_for_who_is_spared(
    members: list[Participant], policy: Policy, fuse_tokens: int
) -> None:
    options = {"policy": policy, "fuse_tokens": fuse_tokens, "keep_tokens": 10**6}
    passes = [action for action in derive_round(1, members, **options).actions if isinstance(action, MicroBatch)]
    assert all(batch.keep for batch in passes if any(item.kind == "carry" for item in batch.items))
    lean = {"task-0", "task-2"}
    spared = derive_round(1, members, **options, spared=lean)
    require_legal(spared)
    for batch in spared.actions:
        if isinstance(batch, MicroBatch):
            named = {item.task for item in batch.items}
            assert not (batch.keep and named & lean)
            assert batch.recompute == (batch.trains and bool(named & lean))
            assert batch.keep or bool(named & lean) or not any(item.kind == "carry" for item in batch.items)
    assert not any(isinstance(one, MicroBatch) and one.keep for one in _recomputed(members, policy).actions)


def _recomputed(members: list[Participant], policy: Policy) -> RoundSchedule:
    return derive_round(1, members, policy=policy, fuse_tokens=64, keep_tokens=10**6, recompute=True)


def test_the_way_back_mirrors_the_way_forward() -> None:
    """Of three pieces and a tail, of two and a tail, and of a task that cuts nothing."""
    c = Participant("c", "c/x", ((SequenceRef(0, 5),), (SequenceRef(1, 4),)))
    members = [_cut("a", 16), _cut("b", 12), c]
    tails, back = "a12 b8 c0", ["resume a8", "resume a4 b4"]
    assert _told(_round(members, "fuse-all", 100, 20)) == [
        "keep a0 b0", "keep a4 b4", "keep a8", tails, *back, "resume a0 b0", "a", "b", "c0", "c",
    ]  # fmt: skip
    assert _told(_round(members, "fuse-all", 100, 19)) == [  # the last that fit; the others run twice
        "a0 b0", "keep a4 b4", "keep a8", tails, *back, "a0 b0 c0", "a", "b", "c",
    ]  # fmt: skip
    assert _told(_round(members, "fuse-all", 100, 0))[:6] == ["a0 b0", "a4 b4", "a8", tails, "a8 b4 c0", "c"]


def _cut(task: str, length: int) -> Participant:
    """One sequence in pieces of 4."""
    chunks = align([length], 4)
    refs = tuple((SequenceRef(0, 4, chunk.pieces[0].start, length),) for chunk in chunks)
    return Participant(task, f"{task}/x", refs, carried=frozenset(range(length // 4 - 1)))


def _told(schedule: RoundSchedule) -> list[str]:
    told = []
    for action in schedule.actions:
        if isinstance(action, OptimStep):
            told.append(action.task)
            continue
        how = ("resume " if action.resumes else "keep ") if action.keep else ""
        told.append(how + " ".join(f"{item.task}{item.sequences[0].start}" for item in action.items))
    return told


def test_a_pair_of_dpo_is_never_kept() -> None:
    chunks = align([8, 8], 4, group=2)
    refs = tuple(
        tuple(SequenceRef(piece.place, piece.rows, piece.start, 8) for piece in chunk.pieces) for chunk in chunks
    )
    carried = frozenset(place for place, chunk in enumerate(chunks) if chunk.kind == "carry")
    pair = Participant("pair", "pair/x", refs, 1, loss="dpo", beta=0.1, carried=carried)
    schedule = _round([pair, _cut("a", 16)], "fuse-all", 100, 1000)
    require_legal(schedule)
    for batch in schedule.actions:
        if isinstance(batch, MicroBatch):
            kinds = {item.kind for item in batch.items}
            assert batch.keep == ("carry" in kinds) or batch.resumes


@given(participants(), BUDGETS)
def test_a_fused_micro_batch_stays_within_its_tokens_unless_one_chunk_alone_does_not(
    members: list[Participant], fuse_tokens: int
) -> None:
    schedule = _round(members, "fuse-all", fuse_tokens)
    for action in schedule.actions:
        if isinstance(action, MicroBatch):
            assert action.tokens <= fuse_tokens or len(action.items) == 1


@given(participants(), BUDGETS)
def test_a_padded_micro_batch_is_as_wide_as_its_longest_and_stays_within_its_rows(
    members: list[Participant], fuse_tokens: int
) -> None:
    for action in _round(members, "padded", fuse_tokens).actions:
        if isinstance(action, MicroBatch):
            lengths = [ref.length for item in action.items for ref in item.sequences]
            assert action.width == max(lengths)
            assert action.width * len(lengths) <= fuse_tokens or len(action.items) == 1


@given(participants(), BUDGETS)
def test_neighbours_that_fit_together_run_together(members: list[Participant], fuse_tokens: int) -> None:
    htasks = fuse(members, "fuse-all", fuse_tokens)
    assert [member for htask in htasks for member in htask] == [member for member in members if member.chunks]
    for htask, after in pairwise(htasks):
        assert sum(member.widest for member in htask) + after[0].widest > fuse_tokens


@given(participants(), plans(), BUDGETS)
def test_a_plan_says_who_runs_together_and_in_which_order(
    members: list[Participant], plan: Plan, fuse_tokens: int
) -> None:
    schedule = derive_round(3, members, policy="muxtune", fuse_tokens=fuse_tokens, plan=plan)
    require_legal(schedule)
    place_of = {name: place for place, htask in enumerate(plan.htasks) for name in htask.tasks}
    places = []
    for action in schedule.actions:
        if isinstance(action, MicroBatch):
            assert action.tokens <= fuse_tokens or len(action.items) == 1
            (place,) = {place_of.get(item.task, len(plan.htasks)) for item in action.items}
            places.append(place)
    assert places == sorted(places)
    for member in members:
        assert tuple(item.sequences for item in _items(schedule) if item.task == member.task) == member.chunks


@given(participants())
def test_without_a_plan_all_that_fit_run_together(members: list[Participant]) -> None:
    assert fuse(members, "muxtune", 100) == fuse(members, "fuse-all", 100)


@given(participants())
def test_sequential_runs_each_task_alone(members: list[Participant]) -> None:
    schedule = _round(members, "sequential", 10_000)
    assert all(len(action.items) == 1 for action in schedule.actions if isinstance(action, MicroBatch))


@given(participants(forward=True), POLICIES, st.sampled_from(["eval", "reference"]))
def test_a_forward_round_has_no_losses_and_no_steps(members: list[Participant], policy: Policy, kind: str) -> None:
    schedule = derive_round(0, members, policy=policy, fuse_tokens=64, kind=kind)
    assert all(isinstance(action, MicroBatch) for action in schedule.actions)
    assert all(item.kind == kind and item.loss is None for item in _items(schedule))
    require_legal(schedule)


def test_micro_batches_are_numbered_by_htask_and_chunk() -> None:
    one = Participant("one", "one/train", ((SequenceRef(0, 5),), (SequenceRef(1, 6),)), 4)
    two = Participant("two", "two/train", ((SequenceRef(7, 5), SequenceRef(8, 1)),), 9)
    actions = _round([one, two], "fuse-all", 64).actions
    first, step_two, second, step_one = actions
    assert isinstance(first, MicroBatch) and isinstance(second, MicroBatch)
    assert (first.htask, first.chunk, first.tokens) == (0, 0, 11) and first.trains
    assert (second.htask, second.chunk, second.tokens) == (0, 1, 6)
    assert (step_two, step_one) == (OptimStep("two"), OptimStep("one"))
    apart = [action for action in _round([one, two], "sequential", 64).actions if isinstance(action, MicroBatch)]
    assert [(batch.htask, batch.chunk) for batch in apart] == [(0, 0), (0, 1), (1, 0)]


def test_a_plan_is_frozen_data() -> None:
    schedule = _round([Participant("one", "one/train", ((SequenceRef(0, 5),),), 4)], "fuse-all", 64)
    with pytest.raises(FrozenInstanceError):
        schedule.round = 4  # type: ignore[misc]
    assert hash(schedule) == hash(_round([Participant("one", "one/train", ((SequenceRef(0, 5),),), 4)], "fuse-all", 1))


def test_a_gradient_of_an_earlier_schedule_may_be_applied() -> None:
    step = RoundSchedule(0, (OptimStep("one"),))
    require_legal(step, pending={"one"})
    with pytest.raises(StateError, match="no gradient"):
        require_legal(step, pending={"two"})
