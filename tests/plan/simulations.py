"""Simulated hTasks and clusters, as hypothesis draws them and as closed forms need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from muxtune.plan.cost import PassCost
from muxtune.plan.simulate import SimPass, SimTask, simulate
from muxtune.plan.stages import Footprint
from muxtune.plan.timeline import Timeline
from muxtune.spec import ClusterSpec, Link
from tests.plan.pipelines import partitions

ROW_BYTES = 4
FREE = Link(bandwidth=2**62)  # a message takes next to nothing


@dataclass(frozen=True, slots=True)
class Simulation:
    tasks: tuple[SimTask, ...]
    buckets: tuple[tuple[int, ...], ...]
    cluster: ClusterSpec
    layers: int
    iterations: int

    def run(self, tasks: Sequence[SimTask] | None = None, buckets: Sequence[Sequence[int]] | None = None) -> Timeline:
        return simulate(
            tasks or self.tasks,
            buckets or self.buckets,
            self.cluster,
            layers=self.layers,
            row_bytes=ROW_BYTES,
            iterations=self.iterations,
        )


def cluster(pp: int, tp: int = 1, *, tp_link: Link = FREE, pp_link: Link = FREE, speed: float = 1) -> ClusterSpec:
    return ClusterSpec(devices=pp * tp, pp=pp, tp=tp, tp_link=tp_link, pp_link=pp_link, speed=speed)


def even(
    *, passes: int = 1, forward_s: float = 1.0, backward_s: float = 1.0, name: str = "a", **more: float
) -> SimTask:
    """An hTask whose passes are all alike: seconds of a layer each way, nothing at the ends."""
    one = SimPass(PassCost(16, more.get("entry_s", 0.0), forward_s, backward_s, more.get("exit_s", 0.0)))
    return SimTask((name,), (one,) * passes, more.get("step_s", 0.0), 16 * passes)


SECONDS = st.floats(0.01, 9)
LINKS = st.builds(Link, bandwidth=st.integers(1, 1000), latency_s=st.floats(0, 1))


@st.composite
def sim_tasks(draw: st.DrawFn, name: str) -> SimTask:
    trains = [*draw(st.lists(st.booleans(), max_size=3)), True]
    passes = tuple(
        SimPass(
            PassCost(
                draw(st.integers(1, 99)),
                draw(SECONDS),
                draw(SECONDS),
                draw(SECONDS) if comes_back else 0.0,
                draw(SECONDS) if comes_back else 0.0,
            ),
            comes_back,
        )
        for comes_back in trains
    )
    footprint = Footprint(draw(st.integers(0, 99)), draw(st.integers(1, 999)))
    return SimTask((name,), passes, draw(SECONDS), draw(st.integers(1, 999)), footprint)


@st.composite
def simulations(draw: st.DrawFn, *, max_stages: int = 4, max_tp: int = 2) -> Simulation:
    tasks = tuple(draw(sim_tasks(f"task-{number}")) for number in range(draw(st.integers(1, 4))))
    stages, tp = draw(st.integers(1, max_stages)), draw(st.integers(1, max_tp))
    made = cluster(stages, tp, tp_link=draw(LINKS), pp_link=draw(LINKS), speed=draw(st.sampled_from([0.5, 1, 2])))
    return Simulation(
        tasks,
        draw(partitions(len(tasks))),
        made,
        stages + draw(st.integers(0, 3)),
        draw(st.integers(1, 3)),
    )
