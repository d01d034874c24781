"""When each task is done: a plan holds until a task has taken its last step; who is left is planned anew.

Between two changes of membership an iteration is simulated a few times, and what follows is taken to add what the last
two of those added on average: pipelines repeat themselves soon, if not at once. A pipeline runs empty where its plan
changes. Cost: two simulations of a few iterations for each number of steps that tasks have left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from muxtune.plan.loads import TaskLoad
from muxtune.plan.simulate import SimTask, balanced_split, simulate
from muxtune.spec.cluster import ClusterSpec

SIMULATED_ITERATIONS = 6
AVERAGED_ITERATIONS = 2

Planned = tuple[Sequence[SimTask], Sequence[Sequence[int]]]  # hTasks, and buckets of their places


def completion(
    loads: Sequence[TaskLoad],
    plan: Callable[[Sequence[TaskLoad]], Planned],
    cluster: ClusterSpec,
    *,
    layers: int,
    row_bytes: int,
    split: Sequence[int] | None = None,
) -> Mapping[str, float]:
    """Seconds from the start to each task's last step; 0 for one that has none left.

    Args:
        plan: the hTasks of the tasks that still train. Each of these is in one of them, under its name.
        split: layers of each stage, for the whole time; balanced for the first plan where nothing is said.

    Raises ConfigError for more stages than layers.
    """
    done = {load.name: 0.0 for load in loads}
    active = [load for load in loads if load.steps > 0]
    elapsed = 0.0
    while active:
        tasks, buckets = plan(active)
        split = split or balanced_split(tasks, layers, cluster.pp)
        iterations = min(load.steps for load in active)
        shown = min(iterations, SIMULATED_ITERATIONS)
        counts = (shown,) if iterations == shown else (shown, shown - AVERAGED_ITERATIONS)
        run = [
            simulate(tasks, buckets, cluster, layers=layers, row_bytes=row_bytes, iterations=count, split=split)
            for count in counts
        ]
        skipped_s = (iterations - shown) * (run[0].wall_s - run[-1].wall_s) / AVERAGED_ITERATIONS
        places = {name: place for place, task in enumerate(tasks) for name in task.tasks}
        for load in (one for one in active if one.steps == iterations):
            done[load.name] = elapsed + run[0].stepped_s(places[load.name], shown - 1) + skipped_s
        elapsed += run[0].wall_s + skipped_s
        active = [replace(load, steps=load.steps - iterations) for load in active if load.steps > iterations]
    return done
