"""Whether the plan that is predicted to be best is: the mixes of `prediction`, each under every policy.

In each round all policies run the same batches of the same tasks, in turning order; the policy that the simulator calls
best for these tasks is then held against the one that was measured to be best. Policies that come to the same hTasks of
packed rows are one choice, and what was measured of them is taken together: else noise would choose among them. Regret
is how much longer the chosen one took: the median of the ratios of each round, 0 where they are the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.prediction import Mix, attach_mix, draw, executed, most_length
from muxtune.engine.engine import Engine
from muxtune.engine.loads import load_of
from muxtune.engine.planning import Planning
from muxtune.engine.task import Task
from muxtune.models.backbone import Backbone
from muxtune.plan.cost import CostModel
from muxtune.plan.memory import MemoryModel
from muxtune.plan.planner import make_plan
from muxtune.plan.profile import OperatorTable
from muxtune.spec.policy import POLICIES, Policy

FUSE_TOKENS = 2048
BUDGETS = (64, 128, 256, 512, 1024, 2048)
USUAL = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one mix: seconds of an iteration, predicted and measured in each round, by policy; policies that are one
    choice have one name, such as "fuse-all = muxtune"."""

    number: int
    tasks: int
    predicted_s: dict[str, float]
    measured_s: dict[str, tuple[float, ...]]

    @property
    def chosen(self) -> str:
        return min(self.predicted_s, key=lambda policy: self.predicted_s[policy])

    @property
    def best(self) -> str:
        return min(self.measured_s, key=lambda policy: statistics.median(self.measured_s[policy]))

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.number:3d} {self.tasks:2d} tasks: chose {self.chosen}, best {self.best}, {self.regret:+.1%}"

    @property
    def regret(self) -> float:
        """How much longer the chosen one took than the best."""
        pairs = zip(self.measured_s[self.chosen], self.measured_s[self.best], strict=True)
        return max(0.0, statistics.median(one / other for one, other in pairs) - 1)


@dataclass(frozen=True, slots=True)
class Choices:
    """`chunk_lengths`: see the function."""

    choices: tuple[Choice, ...]
    chunk_lengths: dict[int, float] = field(default_factory=dict)

    def regret(self, share: float) -> float:
        """A quantile."""
        return float(np.quantile([one.regret for one in self.choices], share))

    @property
    def within(self) -> float:
        """The part of the mixes whose chosen policy was within 5 % of the best."""
        return statistics.mean(one.regret <= 0.05 for one in self.choices)


def choices(
    backbone: Backbone,
    table: OperatorTable,
    *,
    mixes: int,
    seed: int,
    rounds: int,
    clock: Callable[[], float],
    tell: Callable[[Choice], None] = lambda choice: None,
) -> Choices:
    """Of mixes of two tasks and more."""
    found: list[Choice] = []
    number = 0
    while len(found) < mixes:
        mix = draw(seed, number, most_length(backbone))
        number += 1
        if len(mix.members) > 1:
            found.append(choice(backbone, table, mix, rounds=rounds, clock=clock))
            tell(found[-1])
    return Choices(tuple(found), chunk_lengths(backbone, table, mixes=mixes, seed=seed))


def choice(backbone: Backbone, table: OperatorTable, mix: Mix, *, rounds: int, clock: Callable[[], float]) -> Choice:
    """Run one mix under every policy."""
    planning = Planning(lambda: table, MemoryModel(), backbone.places, refine=False)
    engine = Engine(backbone, policy="muxtune", planning=planning, fuse_tokens=FUSE_TOKENS)
    tasks = attach_mix(engine, mix)
    loads = [planning.load(task) for task in tasks]
    most_rows = max(FUSE_TOKENS, *(load.peak_rows for load in loads))
    cost = CostModel(table)
    plans = {policy: make_plan(loads, cost, MemoryModel(), policy, most_rows=most_rows) for policy in POLICIES}
    measured: dict[Policy, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(rounds + 1):
        participants = [task.participant() for task in tasks]
        engine.refer(participants)
        for policy in _turned(POLICIES, number):
            engine.policy = policy
            seconds, _ = executed(engine, engine.schedule(participants), clock)
            if number:
                measured[policy].append(seconds)
    same: dict[object, list[Policy]] = {}
    for policy, plan in plans.items():
        key = policy if policy == "padded" else frozenset(frozenset(htask.tasks) for htask in plan.htasks)
        same.setdefault(key, []).append(policy)
    return Choice(
        mix.number,
        len(tasks),
        {" = ".join(alike): plans[alike[0]].iteration_s for alike in same.values()},
        {" = ".join(alike): _together([measured[policy] for policy in alike]) for alike in same.values()},
    )


def _together(measured: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Round by round, of policies that did the same."""
    return tuple(statistics.mean(round_s) for round_s in zip(*measured, strict=True))


def _turned(policies: Sequence[Policy], by: int) -> list[Policy]:
    turn = by % len(policies)
    return [*policies[turn:], *policies[:turn]]


def chunk_lengths(backbone: Backbone, table: OperatorTable, *, mixes: int, seed: int) -> dict[int, float]:
    """What the step of a task alone is predicted to take with other chunk budgets, over the usual one: medians over the
    tasks of the mixes that bring more rows than that."""
    cost, engine = CostModel(table), Engine(backbone)
    ratios: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    for number in range(mixes):
        for task in attach_mix(engine, draw(seed, number, most_length(backbone))):
            seconds = {budget: _alone_s(task, budget, backbone, cost) for budget in BUDGETS}
            rows = sum(len(task.data.train[index]) for index in task.sampler.batch(0))
            if rows > USUAL:
                for budget in BUDGETS:
                    ratios[budget].append(seconds[budget] / seconds[USUAL])
            engine.detach(task)
    return {budget: statistics.median(values) for budget, values in ratios.items() if values}


def _alone_s(task: Task, budget: int, backbone: Backbone, cost: CostModel) -> float:
    load = load_of(task.job, task.data.train, budget, backbone.places)
    return make_plan([load], cost, MemoryModel()).iteration_s
