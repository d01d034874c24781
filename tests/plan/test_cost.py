"""The cost of a pass: what is shared and what adds up, and what padding, recomputation and adapters change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.cost import CostModel, padded_rows
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad
from muxtune.plan.profile import AdapterCost, Curve, Directions, OperatorTable

LAYERS = 3


def _line(floor: float, slope: float, *counts: int) -> Curve:
    counts = counts or (16, 64, 256)
    return Curve(tuple(map(float, counts)), tuple(floor + slope * count for count in counts))


def _both(floor: float, slope: float) -> Directions:
    return Directions(_line(floor, slope), _line(2 * floor, 2 * slope))


TABLE = OperatorTable(
    "m",
    "cpu",
    "float32",
    1,
    LAYERS,
    8,
    _line(1.0, 0.01),
    {1: _both(2.0, 0.1), 2: _both(1.5, 0.05)},
    _both(0.2, 0.001),
    _both(0.5, 0.02),
    {
        "lora": (AdapterCost(1000, _both(0.3, 0.01), 10), AdapterCost(4000, _both(0.6, 0.04), 10)),
        "dora": (AdapterCost(1100, _both(0.5, 0.02), 10, 7.0),),
        "prefix_tuning": (AdapterCost(0, Directions(Curve((1.0,), (0.0,)), Curve((1.0,), (0.0,)))),),
    },
    _line(0.01, 1e-6, 1000, 10_000),
    Directions(Curve((16.0, 4096.0), (0.3, 2.0)), Curve((16.0, 4096.0), (0.6, 4.0))),
)


def _whole(*rows: int) -> tuple[Span, ...]:
    return tuple(Span(one, one) for one in rows)


@st.composite
def members(draw: st.DrawFn) -> list[tuple[TaskLoad, ChunkLoad]]:
    made = []
    trains = draw(st.booleans())
    for number in range(draw(st.integers(1, 6))):
        spans = tuple(
            Span(rows, rows + draw(st.sampled_from([0, 0, 16])))
            for rows in draw(st.lists(st.integers(1, 90), min_size=1))
        )
        rows = sum(span.rows for span in spans)
        chunk = ChunkLoad(spans, draw(st.integers(0, rows)), trains, draw(st.sampled_from([0, rows])))
        label = draw(st.sampled_from(["lora", "dora", "lora+dropout", "dora+rslora", "unheard_of", "prefix_tuning"]))
        task = TaskLoad(f"t{number}", (chunk,), label, draw(st.integers(0, 9000)), points=draw(st.integers(0, 12)))
        made.append((task, chunk))
    return made


@given(members(), st.booleans(), st.sampled_from([1.0, 1.3]))
def test_a_pass_is_what_its_members_share_and_what_is_each_one_s_own(
    fused: list[tuple[TaskLoad, ChunkLoad]], recompute: bool, scale: float
) -> None:
    cost = CostModel(TABLE, recompute=recompute, scale=scale)
    rows, trained = (float(sum(getattr(chunk, key) for _, chunk in fused)) for key in ("rows", "trained"))
    shared = float(cost.shared_s(np.array(rows), np.array(trained), trains=fused[0][1].trains))
    whole = cost.pass_cost(fused).total_s(LAYERS)
    assert whole == pytest.approx(shared + sum(cost.own_s(*member) for member in fused))
    assert whole == pytest.approx(scale * CostModel(TABLE, recompute=recompute).pass_cost(fused).total_s(LAYERS))


@given(members(), st.integers(1, 40))
def test_more_rows_or_more_members_never_cost_less(fused: list[tuple[TaskLoad, ChunkLoad]], more: int) -> None:
    cost = CostModel(TABLE)
    whole = cost.pass_cost(fused).total_s(LAYERS)
    (task, chunk), *others = fused
    longer = ChunkLoad((*chunk.spans, *_whole(more)), chunk.trained, chunk.trains, chunk.compared)
    assert cost.pass_cost([(task, longer), *others]).total_s(LAYERS) > whole - 1e-9
    if others:
        assert cost.pass_cost(others).total_s(LAYERS) < whole


@given(members())
def test_recomputation_runs_each_layer_forward_once_more(fused: list[tuple[TaskLoad, ChunkLoad]]) -> None:
    once, again = (CostModel(TABLE, recompute=recompute).pass_cost(fused) for recompute in (False, True))
    added = once.forward_s if fused[0][1].trains else 0.0
    assert again.backward_s == pytest.approx(once.backward_s + added)
    assert again.forward_s == once.forward_s


def test_rows_are_padded_to_a_multiple_and_sequences_to_the_width_asked_for() -> None:
    assert padded_rows(np.array([1.0, 16.0, 17.0])).tolist() == [16, 16, 32]
    cost = CostModel(TABLE)
    task = TaskLoad("t", (chunk := ChunkLoad(_whole(10, 20), 8),))
    assert cost.pass_cost([(task, chunk)]).rows == 32
    wide = cost.pass_cost([(task, chunk)], width=20)
    assert wide.rows == 48
    filled = ChunkLoad(_whole(10, 20, 10), 8)
    alike = cost.pass_cost([(TaskLoad("t", (filled,), "prefix_tuning"), filled)])
    own = cost.pass_cost([(TaskLoad("t", (chunk,), "prefix_tuning"), chunk)], width=20)
    assert own.forward_s == pytest.approx(alike.forward_s), "rows of nobody attend to each other"


def test_a_pass_that_goes_forward_only_has_no_way_back_and_dpo_asks_the_head_once_more() -> None:
    cost = CostModel(TABLE)
    forward = ChunkLoad(_whole(64), 30, trains=False)
    there = cost.pass_cost([(TaskLoad("t", (forward,)), forward)])
    assert there.backward_s == 0 and there.exit_s == pytest.approx(float(TABLE.head.forward(30)))
    sft, dpo = ChunkLoad(_whole(64), 30), ChunkLoad(_whole(64), 30, compared=30)
    one, other = (cost.pass_cost([(TaskLoad("t", (chunk,)), chunk)]) for chunk in (sft, dpo))
    assert other.exit_s - one.exit_s == pytest.approx(float(TABLE.head.forward(30)))


def test_rows_that_see_more_than_themselves_cost_what_was_seen_of_such() -> None:
    cost = CostModel(TABLE)
    piece, whole = ChunkLoad((Span(32, 96),), 8), ChunkLoad((Span(32, 32),), 8)
    load = TaskLoad("t", (piece,), "prefix_tuning")
    one, other = cost.pass_cost([(load, piece)]), cost.pass_cost([(load, whole)])
    more = float(TABLE.seen.forward(32 * 96) - TABLE.attention.forward(32)) if TABLE.seen else 0.0
    assert one.forward_s - other.forward_s == pytest.approx(more)


@pytest.mark.parametrize(
    ("label", "parameters", "points", "expected"),
    [
        ("lora", 1000, 10, 0.3 + 0.64),
        ("lora", 4000, 10, 0.6 + 2.56),
        ("lora", 2500, 0, (0.94 + 3.16) / 2),
        ("lora", 500, 5, (0.94 - 1000 * 2.22 / 3000) / 2 + 500 * 2.22 / 3000),
        ("lora+dropout", 1000, 10, 0.3 + 0.64),
        ("never heard of", 1000, 10, 0.3 + 0.64),
        ("dora", 9999, 5, (0.5 + 1.28) / 2),
        ("dora+rslora", 9999, 10, 0.5 + 1.28),
        ("prefix_tuning", 5, 0, 0.0),
    ],
)
def test_an_adapter_costs_by_its_points_and_by_its_parameters(
    label: str, parameters: int, points: int, expected: float
) -> None:
    chunk = ChunkLoad(_whole(64), 8)
    cost = CostModel(TABLE)
    bare = cost.pass_cost([(TaskLoad("t", (chunk,), "prefix_tuning"), chunk)])
    own = cost.pass_cost([(TaskLoad("t", (chunk,), label, parameters, points=points), chunk)])
    assert LAYERS * (own.forward_s - bare.forward_s) == pytest.approx(expected)
    assert LAYERS * (own.backward_s - bare.backward_s) == pytest.approx(2 * expected)


def test_a_step_is_the_optimizer_and_what_the_adapter_makes_anew() -> None:
    chunk = ChunkLoad(_whole(16), 8)
    plain = CostModel(TABLE).step_s(TaskLoad("t", (chunk,), "lora", 1000))
    assert plain == pytest.approx(0.011)
    assert CostModel(TABLE, scale=2).step_s(TaskLoad("t", (chunk,), "dora", 1000)) == pytest.approx(2 * 7.011)


def test_degrees_have_layers_of_their_own() -> None:
    chunk = ChunkLoad(_whole(64), 8)
    member = TaskLoad("t", (chunk,), "prefix_tuning"), chunk
    halves = CostModel(TABLE, degree=2).pass_cost([member])
    assert CostModel(TABLE).pass_cost([member]).forward_s - halves.forward_s == pytest.approx(0.5 + 0.05 * 64)
