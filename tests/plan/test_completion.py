"""When tasks are done: sums on one device, simulated whole where that is cheap, planned anew when members leave."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.plan.completion import completion
from muxtune.plan.grouping import group
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad
from muxtune.plan.simulate import SimTask, simulate
from muxtune.spec import ClusterSpec, Link
from tests.plan.simulations import ROW_BYTES, cluster, even

Planned = tuple[Sequence[SimTask], Sequence[Sequence[int]]]
LAYERS = 4


def _load(name: str, steps: int, passes: int = 1) -> TaskLoad:
    return TaskLoad(name, (ChunkLoad((Span(16, 16),), 16),) * passes, steps=steps)


def _each(loads: Sequence[TaskLoad]) -> Planned:
    """Each task alone, a forward and a backward second a layer for each chunk, and two seconds a step."""
    tasks = [even(passes=len(load.chunks), name=load.name, step_s=2.0) for load in loads]
    return tasks, [(place,) for place in range(len(tasks))]


def _fused(loads: Sequence[TaskLoad]) -> Planned:
    """All in one hTask, which takes as long as one."""
    one = even(step_s=2.0)
    return [SimTask(tuple(load.name for load in loads), one.passes, one.step_s)], [(0,)]


def _completion(loads: Sequence[TaskLoad], made: ClusterSpec, plan: object = _each) -> dict[str, float]:
    return dict(completion(loads, plan, made, layers=LAYERS, row_bytes=ROW_BYTES))  # type: ignore[arg-type]


def test_on_one_device_iterations_shrink_as_members_leave() -> None:
    loads = [_load("short", 1), _load("long", 10), _load("middle", 7), _load("none", 0)]
    each = 2 * LAYERS + 2
    found = _completion(loads, ClusterSpec())
    assert found == {
        "short": pytest.approx(each),
        "middle": pytest.approx(3 * each + 6 * 2 * each),  # one iteration of three, then six of two
        "long": pytest.approx(3 * each + 6 * 2 * each + 3 * each),
        "none": 0,
    }


def test_the_plan_is_asked_anew_for_those_who_are_left() -> None:
    asked: list[tuple[tuple[str, int], ...]] = []

    def plan(loads: Sequence[TaskLoad]) -> Planned:
        asked.append(tuple((load.name, load.steps) for load in loads))
        return _fused(loads)

    found = _completion([_load("a", 2), _load("b", 9), _load("c", 2)], ClusterSpec(), plan)
    assert asked == [(("a", 2), ("b", 9), ("c", 2)), (("b", 7),)]
    each = 2 * LAYERS + 2
    assert found == {"a": pytest.approx(2 * each), "c": pytest.approx(2 * each), "b": pytest.approx(9 * each)}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 30),
)
def test_what_is_not_simulated_is_near_to_what_would_be(
    tasks: list[tuple[int, int]], stages: int, tp: int, steps: int
) -> None:
    link = Link(bandwidth=200, latency_s=0.01)
    made = cluster(stages, tp, tp_link=link, pp_link=link)

    def plan(loads: Sequence[TaskLoad]) -> Planned:
        found = [
            even(passes=passes, forward_s=length, backward_s=length, name=load.name, step_s=0.5)
            for load, (length, passes) in zip(loads, tasks, strict=True)
        ]
        return found, group([task.total_s(LAYERS) for task in found], (len(found) + 1) // 2)

    loads = [_load(str(number), steps) for number in range(len(tasks))]
    found = _completion(loads, made, plan)
    planned, buckets = plan(loads)
    whole = simulate(planned, buckets, made, layers=LAYERS, row_bytes=ROW_BYTES, iterations=steps)
    assert found == {
        load.name: pytest.approx(whole.stepped_s(place, steps - 1), rel=0.02) for place, load in enumerate(loads)
    }
