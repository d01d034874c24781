"""The operator table: its curves, and that a file gives back what was written or nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.profile import (
    BUSY_OTHERS,
    BUSY_SPREAD,
    VERSION,
    AdapterCost,
    Curve,
    Directions,
    OperatorTable,
    by_size,
    from_json,
)

_SECONDS = st.floats(0, 10, allow_nan=False)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    counts = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=6)))
    return Curve(tuple(map(float, counts)), tuple(draw(_SECONDS) for _ in counts))


def directions() -> st.SearchStrategy[Directions]:
    return st.builds(Directions, curves(), curves())


@st.composite
def tables(draw: st.DrawFn) -> OperatorTable:
    costs = st.builds(AdapterCost, st.integers(0, 10**9), directions(), st.integers(0, 300), _SECONDS)
    return OperatorTable(
        draw(st.text(max_size=20)),
        "cpu",
        "float32",
        2,
        draw(st.integers(1, 80)),
        2304,
        draw(curves()),
        {1: draw(directions()), 4: draw(directions())},
        draw(directions()),
        draw(directions()),
        {"lora": (draw(costs), draw(costs)), "ia3": (draw(costs),)},
        draw(curves()),
        draw(st.none() | directions()),
        spread=draw(_SECONDS),
        others=draw(_SECONDS),
    )


@given(tables())
def test_a_table_comes_back_from_its_file(table: OperatorTable) -> None:
    assert from_json(table.to_json()) == table == from_json(table.to_json().encode())


@given(tables(), st.integers(0, 10**6))
def test_a_file_that_was_cut_off_is_no_table(table: OperatorTable, at: int) -> None:
    text = table.to_json()
    assert from_json(text[: at % len(text)]) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), VERSION + 1),
        (("layers",), "thirty"),
        (("layers",), -1),
        (("entry", "seconds", 0), float("nan")),
        (("entry", "seconds", 0), -1.0),
        (("entry", "counts", 1), 16),
        (("entry", "counts"), []),
        (("layer",), {"2": {}}),
        (("adapters", "lora", 0), {"parameters": 1}),
        (("adapters",), None),
        (("seen",), 7),
    ],
)
def test_a_file_of_another_version_or_a_damaged_one_is_no_table(path: tuple[str | int, ...], value: object) -> None:
    line = Directions(Curve((16.0, 32.0), (1.0, 2.0)), Curve((16.0,), (1.0,)))
    table = OperatorTable("m", "cpu", "float32", 1, 2, 8, line.forward, {1: line}, line, line, {}, line.forward)
    known = json.loads(replace(table, adapters={"lora": (AdapterCost(1, line),)}).to_json())
    assert from_json(json.dumps(known)) is not None
    *outer, last = path
    place = known
    for key in outer:
        place = place[key]
    place[last] = value
    assert from_json(json.dumps(known)) is None


@pytest.mark.parametrize("text", ["", "null", "[]", "7", '"x"', "{}", "[" * 100_000, b"\xff\xfe"])
def test_whatever_else_a_file_holds_is_no_table(text: str | bytes) -> None:
    assert from_json(text) is None


@given(curves(), st.floats(0.01, 20_000))
def test_a_curve_is_flat_below_linear_between_and_goes_on_above(curve: Curve, count: float) -> None:
    found = float(curve(count))
    assert found >= 0 and float(curve(0)) == 0
    if count <= curve.counts[0]:
        assert found == pytest.approx(curve.seconds[0])
    elif count >= curve.counts[-1]:
        assert found >= curve.seconds[-1]
        more = float(curve(count + 100)) - found
        assert more == pytest.approx(float(curve(count + 200)) - found - more, abs=1e-6)
    else:
        assert min(curve.seconds) - 1e-12 <= found <= max(curve.seconds) + 1e-12
    assert np.allclose(curve.scaled(2)([count]), 2 * found)


@st.composite
def rising(draw: st.DrawFn) -> list[AdapterCost]:
    """One type's adapters as they were measured: curves that rise, and sizes that contradict each other."""
    counts = tuple(map(float, sorted(draw(st.sets(st.integers(1, 512), min_size=1, max_size=3)))))

    def curve() -> Curve:
        return Curve(counts, tuple(sorted(draw(_SECONDS) for _ in counts)))

    sizes = draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=5, unique=True))
    return [AdapterCost(size, Directions(curve(), curve()), 7, draw(_SECONDS)) for size in sizes]


@given(rising())
def test_a_larger_adapter_takes_no_less_and_no_curve_falls(measured: list[AdapterCost]) -> None:
    found = by_size(measured)
    assert [one.parameters for one in found] == sorted(one.parameters for one in measured)
    total = np.array([np.add(one.cost.forward.seconds, one.cost.backward.seconds) for one in found])
    assert np.all(np.diff(total, axis=0) >= -1e-9) and np.all(np.diff([one.step_s for one in found]) >= -1e-9)
    for one in found:
        for curve in (one.cost.forward, one.cost.backward):
            assert np.all(np.diff(curve.seconds) >= -1e-9) and min(curve.seconds) >= 0
    before = [np.add(one.cost.forward.seconds, one.cost.backward.seconds) for one in measured]
    assert np.sum(before, axis=0) == pytest.approx(total.sum(axis=0)), "noise is shared, and nothing is added"
    again = by_size(found)
    assert [one.cost.forward.seconds for one in again] == [pytest.approx(one.cost.forward.seconds) for one in found]


def test_what_does_not_contradict_itself_is_left_as_it_was_measured() -> None:
    small, large = (AdapterCost(size, Directions(*[Curve((16.0,), (1.0 * size,))] * 2), 7, 0.1) for size in (1, 2))
    assert by_size([large, small]) == (small, large)


def test_repeats_far_apart_and_processors_in_the_hands_of_others_say_that_the_machine_was_busy() -> None:
    line = Directions(Curve((16.0,), (1.0,)), Curve((16.0,), (1.0,)))
    table = OperatorTable("m", "cpu", "float32", 1, 2, 8, line.forward, {1: line}, line, line, {}, line.forward)
    assert not table.busy
    assert replace(table, spread=2 * BUSY_SPREAD).busy and replace(table, others=2 * BUSY_OTHERS).busy
