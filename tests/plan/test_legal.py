"""The order in which a cut sequence's pieces may run: each wrong one is refused, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muxtune.errors import StateError
from muxtune.plan.legal import require_legal
from muxtune.plan.types import Action, LossSpec, MicroBatch, OptimStep, RoundSchedule, SequenceRef, WorkItem, WorkKind


def _piece(kind: WorkKind, start: int, length: int = 4, *, of: int | None = 12, task: str = "one") -> MicroBatch:
    loss = LossSpec(5) if kind == "train" else None
    return MicroBatch(0, 0, (WorkItem(task, kind, f"{task}/data", (SequenceRef(3, length, start, of),), loss),))


STEP = OptimStep("one")
TRAINING: tuple[Action, ...] = (
    _piece("carry", 0),
    _piece("carry", 4),
    _piece("train", 8),
    _piece("train", 4),
    _piece("train", 0),
    STEP,
)
FORWARD: tuple[Action, ...] = (_piece("eval", 0), _piece("eval", 4), _piece("eval", 8))


@pytest.mark.parametrize(
    "actions",
    [
        TRAINING,
        FORWARD,
        (*TRAINING[:2], _piece("carry", 8), *TRAINING[2:]),  # the last piece may go forward too
        (*TRAINING[:5], *TRAINING),  # twice in one step
        (*FORWARD, *TRAINING, *FORWARD),
    ],
)
def test_forward_and_then_back(actions: tuple[Action, ...]) -> None:
    require_legal(RoundSchedule(1, actions))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (TRAINING[1:], "from the first to the last"),
        ((TRAINING[0], *TRAINING[2:]), "before those that it sees"),
        ((*TRAINING[:2], *TRAINING[3:]), "from the last to the first"),
        ((*TRAINING[:3], TRAINING[4], TRAINING[3], STEP), "from the last to the first"),
        (TRAINING[:4], "is not done"),
        ((*TRAINING[:4], STEP, TRAINING[4]), "is not done"),
        ((*TRAINING[:3], TRAINING[1], *TRAINING[3:]), "from the first to the last"),
        (FORWARD[:2], "is not done"),
        (FORWARD[1:], "from the first to the last"),
        ((_piece("carry", 0, 13), *TRAINING), "beyond its sequence"),
        ((_piece("carry", 0, of=None), *TRAINING), "only a cut sequence"),
        ((_piece("train", 4, of=None), STEP), "does not say of what"),
        ((_piece("decode", 0),), "no pieces"),
        ((*TRAINING[:2], *(_piece("train", start, task="two") for start in (8, 4, 0)), *TRAINING[2:]), "it sees"),
    ],
)
def test_nothing_else(actions: tuple[Action, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        require_legal(RoundSchedule(1, actions))


def _two(kind: WorkKind, start: int, *, keep: bool = True, tasks: str = "one two", width: int = 0) -> MicroBatch:
    """A piece of each of two tasks."""
    items = tuple(_piece(kind, start, task=task).items[0] for task in tasks.split())
    return MicroBatch(0, 0, items, width, keep=keep)


KEPT: tuple[Action, ...] = (
    _two("carry", 0),
    _two("carry", 4, keep=False),
    _two("train", 8, keep=False),
    _two("train", 4, keep=False),
    _two("train", 0),
    STEP,
)
APART = tuple(_two(kind, 0, tasks=task) for kind in ("carry", "train") for task in ("one", "two"))


@pytest.mark.parametrize(
    "actions",
    [
        KEPT,
        (_two("carry", 0), _two("carry", 4), KEPT[2], _two("train", 4), *KEPT[4:]),
        (*APART[:2], *KEPT[1:4], *APART[2:], STEP),
        (*KEPT[:5], *KEPT),  # twice in one step
    ],
)
def test_what_is_kept_trains_as_it_went_forward(actions: tuple[Action, ...]) -> None:
    require_legal(RoundSchedule(1, actions))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((*KEPT[:4], _two("train", 0, keep=False), STEP), "trains from what was kept"),
        ((*KEPT[:4], _two("train", 0, tasks="one"), _two("train", 0, tasks="two"), STEP), "exactly these pieces"),
        ((*KEPT[:4], _two("train", 0, tasks="two one"), STEP), "exactly these pieces"),
        ((*KEPT[:4], _two("train", 0, width=8), STEP), "exactly these pieces"),
        ((*KEPT[:3], _two("train", 4), *KEPT[4:]), "exactly these pieces"),
        ((KEPT[1], KEPT[1]), "from the first to the last"),
        ((_two("carry", 0, keep=False), *KEPT[1:]), "exactly these pieces"),
        ((replace(KEPT[0], recompute=True), *KEPT[1:]), "not recomputed"),  # type: ignore[type-var]
        ((*KEPT[:4], replace(KEPT[4], recompute=True), STEP), "not recomputed"),  # type: ignore[type-var]
        ((_two("eval", 0), _two("eval", 4, keep=False), _two("eval", 8, keep=False)), "only a pass of carried pieces"),
        (KEPT[:4], "is not done"),
    ],
)
def test_and_in_no_other_way(actions: tuple[Action, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        require_legal(RoundSchedule(1, actions))


def test_a_part_of_a_kept_piece_may_not_train_alone() -> None:
    whole = MicroBatch(0, 0, _piece("carry", 0, 8).items, keep=True)
    halves = (_piece("train", 8), _piece("train", 4), _piece("train", 0), STEP)
    require_legal(RoundSchedule(1, (replace(whole, keep=False), *halves)))
    with pytest.raises(StateError, match="trains from what was kept"):
        require_legal(RoundSchedule(1, (whole, *halves)))


def _half(kind: WorkKind, index: int, start: int = 0, length: int = 4, of: int | None = None) -> MicroBatch:
    loss = LossSpec(2, "dpo", 0.1)
    refs = (SequenceRef(index, length, start, of),)
    return MicroBatch(0, 0, (WorkItem("one", kind, "one/data", refs, loss),))


PARTED: tuple[Action, ...] = (
    _half("score", 2, 0, of=7),
    _half("score", 2, 4, 3, of=7),
    _half("score", 3),
    _half("train", 2, 4, 3, of=7),
    _half("train", 2, 0, of=7),
    _half("train", 3),
    STEP,
)
COMPARED: tuple[Action, ...] = (_half("eval", 2, 0, of=7), _half("eval", 2, 4, 3, of=7), _half("eval", 3))


@pytest.mark.parametrize("actions", [PARTED, COMPARED, (*COMPARED, *PARTED)])
def test_a_parted_pair_is_scored_and_then_trains(actions: tuple[Action, ...]) -> None:
    require_legal(RoundSchedule(1, actions))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((*PARTED[:2], *PARTED[3:]), "before both its sequences have been scored"),
        ((PARTED[2], *PARTED[5:]), "before both its sequences have been scored"),
        ((*PARTED[:3], PARTED[2], *PARTED[3:]), "scored twice"),
        (COMPARED[:2], "half a pair is evaluated"),
        (COMPARED[2:], "the chosen sequence comes first"),
        ((MicroBatch(0, 0, (WorkItem("one", "score", "one/data", (SequenceRef(2, 4),)),)),), "only dpo is scored"),
        ((_half("reference", 2),), "does not compare here"),
    ],
)
def test_half_a_pair_is_worth_nothing(actions: tuple[Action, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        require_legal(RoundSchedule(1, actions))


def _shared(*refs: SequenceRef, kind: WorkKind = "train") -> RoundSchedule:
    loss = LossSpec(2) if kind == "train" else None
    return RoundSchedule(1, (MicroBatch(0, 0, (WorkItem("one", kind, "one/data", refs, loss),)),))


WHOLE = SequenceRef(0, 8)


@pytest.mark.parametrize("kind", ["train", "eval", "reference"])
def test_whole_sequences_share_tokens_with_the_one_before(kind: WorkKind) -> None:
    require_legal(
        _shared(WHOLE, SequenceRef(1, 9, shared=8), SequenceRef(2, 3, shared=2), SequenceRef(3, 5), kind=kind)
    )


@pytest.mark.parametrize(
    ("refs", "message"),
    [
        ((SequenceRef(1, 9, shared=2), WHOLE), "does not have"),
        ((WHOLE, SequenceRef(1, 12, shared=9)), "does not have"),
        ((WHOLE, SequenceRef(1, 4, shared=4)), "does not have"),
        ((WHOLE, SequenceRef(1, 4, shared=-1)), "does not have"),
        ((SequenceRef(0, 4, 0, 8), SequenceRef(1, 4, shared=2)), "does not have"),
        ((WHOLE, SequenceRef(1, 4, 0, 8, shared=2)), "only whole"),
    ],
)
def test_and_nothing_else_does(refs: tuple[SequenceRef, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        require_legal(_shared(*refs))
