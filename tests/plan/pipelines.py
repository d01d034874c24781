"""Pipelines as hypothesis draws them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from muxtune.plan.pipeline import Template, make_template


@dataclass(frozen=True, slots=True)
class Case:
    """What a template is made from."""

    trains: tuple[tuple[bool, ...], ...]
    buckets: tuple[tuple[int, ...], ...]
    stages: int
    iterations: int
    together: bool
    pass_s: tuple[float, ...]

    @property
    def template(self) -> Template:
        return make_template(
            self.trains,
            self.buckets,
            self.stages,
            iterations=self.iterations,
            together=self.together,
            pass_s=self.pass_s,
        )


@st.composite
def partitions(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], ...]:
    """Buckets of the places of `count` hTasks, in any order."""
    places = draw(st.permutations(range(count)))
    cuts = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    bounds = [0, *sorted(cuts), count]
    return tuple(tuple(places[start:stop]) for start, stop in pairwise(bounds))


@st.composite
def cases(draw: st.DrawFn, *, max_stages: int = 5) -> Case:
    """Up to five hTasks of up to six passes, some of which only go forward."""
    passes = st.lists(st.booleans(), max_size=5).map(lambda trains: (*trains, True))
    trains = tuple(draw(st.lists(passes, min_size=1, max_size=5)))
    return Case(
        trains,
        draw(partitions(len(trains))),
        draw(st.integers(1, max_stages)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        tuple(draw(st.lists(st.floats(0, 9), min_size=len(trains), max_size=len(trains)))),
    )
