"""How well the operator table predicts steps: `python -m benchmarks.prediction`.

    python -m benchmarks.prediction [--mixes 30] [--seed 0] [--rounds 5] [--layers N] [--model NAME] [--threads N]
                                    [--device cpu|cuda] [--cpu-time] [--out FILE]

The table is measured first and then left alone. Mixes are drawn by the seed: 1 to 16 tasks of any PEFT type and size,
lengths 8 to 600, batches of 1 to 8, some dpo, some cut into small chunks, one of three policies. Each runs some rounds,
after one that does not count; a mix's error is the median over rounds of predicted over measured, less one, where the
prediction is of exactly the passes that ran. Prints the median and the 90th percentile of |error| and the worst mixes;
and the same corrected by the machine's *pace*: what one small pass took before and after each mix, over what it took
when the table was measured. A machine whose pace changes cannot be predicted by a table, and shows it there.

`--cpu-time` counts seconds of the processor instead of the wall's: on one thread of a machine that others use, these
are the ones that mean something. PiSSA is left out: it starts with a decomposition of every weight.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.folders import MODEL, model_folder
from benchmarks.machine import describe
from muxtune.data.types import TokenSequence
from muxtune.engine.chain import ChainTrial
from muxtune.engine.engine import Engine
from muxtune.engine.interleaved import Stopwatch
from muxtune.engine.load import choose_device, load_backbone
from muxtune.engine.loads import load_of_task, predicted_s
from muxtune.engine.profiler import measure
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.plan.cost import CostModel
from muxtune.plan.profile import OperatorTable
from muxtune.plan.types import RoundRecord, RoundSchedule
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import PeftBase, read_peft
from muxtune.spec.policy import Policy

MIXES, ROUNDS = 30, 5
LEAST_LENGTH, MOST_LENGTH = 8, 600
MOST_ROWS = 1000  # of a round, so that a mix takes seconds
POLICIES: tuple[Policy, ...] = ("sequential", "fuse-all", "padded")
FUSE_TOKENS = (256, 512, 1024, 2048)
CHUNK_TOKENS = (512, 512, 512, 128)
TYPES = (
    "lora", "lora", "lora", "rslora", "dora", "ia3", "bitfit", "ln_tuning", "shira", "houlsby", "pfeiffer", "parallel",
    "prefix_tuning", "prompt_tuning",
)  # fmt: skip
RANKS, SIZES, PREFIXES = (2, 4, 8, 16, 32, 64), (8, 32, 128), (4, 20, 64)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Member:
    """A task of a mix. `lengths` of its sequences, in pairs where it is dpo; `trained` part of each is a target."""

    peft: PeftBase
    lengths: tuple[int, ...]
    batch: int
    trained: float
    method: str
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    number: int
    members: tuple[Member, ...]
    policy: Policy
    fuse_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a round, medians; `error` is that of the rounds' own ratios."""

    number: int
    what: str
    policy: str
    passes: int
    rows: int
    predicted_s: float
    measured_s: float
    error: float
    pace: float = 1.0

    @property
    def paced(self) -> float:
        """The error of the prediction at the pace that there was."""
        return (1 + self.error) * self.pace - 1


@dataclass(frozen=True, slots=True)
class Report:
    outcomes: tuple[Outcome, ...]

    def quantile(self, share: float, *, paced: bool = False) -> float:
        """Of |error|."""
        return float(np.quantile([abs(one.paced if paced else one.error) for one in self.outcomes], share))

    @property
    def bias(self) -> float:
        return statistics.median(one.error for one in self.outcomes)


def draw(seed: int, number: int, most_length: int = MOST_LENGTH, most_rows: int = MOST_ROWS) -> Mix:
    """Mix `number` of a seed; whatever else is drawn, it is the same."""
    rng = np.random.default_rng([seed, number])
    wanted = int(np.exp(rng.uniform(0, np.log(16.999))))
    members: list[Member] = []
    rows = 0
    while len(members) < wanted:
        member = _member(rng, most_length, max(0, most_rows - rows) // (wanted - len(members)))
        rows += sum(sorted(member.lengths)[-_per_step(member) :])
        members.append(member)
    policy = POLICIES[rng.integers(len(POLICIES))]
    return Mix(number, tuple(members), policy, FUSE_TOKENS[rng.integers(len(FUSE_TOKENS))])


def most_length(backbone: Backbone) -> int:
    """Of a sequence that the backbone takes with any prefix."""
    return min(MOST_LENGTH, (backbone.max_positions or 10**9) - max(PREFIXES))


def _member(rng: np.random.Generator, most_length: int, room: int) -> Member:
    """One whose step has about `room` rows at the most."""
    dpo = bool(rng.random() < 0.15)
    longest = min(max(2 * LEAST_LENGTH, 2 * room), most_length)
    typical = np.exp(rng.uniform(np.log(LEAST_LENGTH), np.log(longest)))
    batch = min(int(rng.integers(1, 9)), max(1, int(room / (typical * (1 + dpo)))))
    count = 3 * batch * (1 + dpo)
    lengths = np.clip(typical * np.exp(rng.normal(0, 0.4, count)), LEAST_LENGTH, most_length).astype(int)
    return Member(
        _peft(rng),
        tuple(lengths.tolist()),
        batch,
        float(rng.uniform(0.1, 1.0)),
        "dpo" if dpo else "sft",
        int(rng.choice(CHUNK_TOKENS)),
    )


def _per_step(member: Member) -> int:
    return member.batch * (2 if member.method == "dpo" else 1)


def _peft(rng: np.random.Generator) -> PeftBase:
    name = TYPES[rng.integers(len(TYPES))]
    settings: dict[str, object] = {"type": name}
    if name in ("lora", "rslora", "dora", "shira"):
        settings["r"] = int(rng.choice(RANKS[:4] if name == "shira" else RANKS))
        if rng.random() < 0.3:
            settings["target_modules"] = ["q_proj", "v_proj"]
    if name in ("lora", "rslora") and rng.random() < 0.3:
        settings["lora_dropout"] = 0.1
    if name in ("houlsby", "pfeiffer", "parallel"):
        settings["bottleneck_size"] = int(rng.choice(SIZES))
    if name.endswith("_tuning") and name != "ln_tuning":
        settings["num_virtual_tokens"] = int(rng.choice(PREFIXES))
    spec = read_peft(settings)
    assert isinstance(spec, PeftBase)
    return spec


def run_mix(engine: Engine, table: OperatorTable, mix: Mix, *, rounds: int, clock: Clock) -> Outcome:
    """Train the mix for some rounds; nothing of it stays attached."""
    engine.policy, engine.fuse_tokens = mix.policy, mix.fuse_tokens
    tasks = attach_mix(engine, mix)
    cost = CostModel(table)
    loads = {task.name: load_of_task(task, engine.backbone.places) for task in tasks}
    predicted, measured, rows, passes = [], [], [], []
    for number in range(rounds + 1):
        participants = [task.participant() for task in tasks]
        engine.refer(participants)
        schedule = engine.schedule(participants)
        expected = sum(predicted_s(schedule, cost, engine.tasks, loads, engine.sources))
        seconds, ran = executed(engine, schedule, clock)
        if number:
            predicted.append(expected), measured.append(seconds), rows.append(ran.rows)
            passes.append(sum(action.rows > 0 for action in ran.actions))
    for task in tasks:
        engine.detach(task)
    error = statistics.median(one / other for one, other in zip(predicted, measured, strict=True)) - 1
    what = ", ".join(f"{load.adapter} {sum(c.rows for c in load.chunks)}" for load in loads.values())
    middle = (statistics.median(values) for values in (passes, rows, predicted, measured))
    count, width, expected, took = middle
    return Outcome(mix.number, what, mix.policy, int(count), int(width), expected, took, error)


def attach_mix(engine: Engine, mix: Mix) -> list[Task]:
    """Its tasks, named by their places."""
    return [_attach(engine, member, f"task-{place}") for place, member in enumerate(mix.members)]


def executed(engine: Engine, schedule: RoundSchedule, clock: Clock) -> tuple[float, RoundRecord]:
    """Run a schedule: seconds, and what ran."""
    gc.collect()
    _synchronize()
    start = clock()
    record = engine.execute(schedule)
    _synchronize()
    return clock() - start, record


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _attach(engine: Engine, member: Member, name: str) -> Task:
    job = JobSpec(
        name=name,
        method=member.method,
        datasets=("sequences.jsonl",),
        peft=member.peft,
        max_steps=1000,
        per_device_train_batch_size=member.batch,
    )
    data = _sequences(member, engine.backbone.vocabulary)
    return engine.attach(job, Sequences(data), chunk_tokens=member.chunk_tokens)


def _sequences(member: Member, vocabulary: int) -> tuple[TokenSequence, ...]:
    rng = np.random.default_rng(len(member.lengths))
    made = []
    for index, length in enumerate(member.lengths):
        mask = np.arange(length) >= min(length - 1, max(1, round(length * (1 - member.trained))))
        made.append(TokenSequence(index, rng.integers(0, vocabulary, length, dtype=np.int32), mask))
    return tuple(made)


class Pace:
    """How long one small pass takes now, over how long it took when this was made."""

    def __init__(self, backbone: Backbone, clock: Clock) -> None:
        self._trial = ChainTrial(backbone, [32] * 4, Stopwatch(clock, backbone.device, 0.0))
        self._began_s = self._seconds()

    def __call__(self) -> float:
        return self._seconds() / self._began_s

    def _seconds(self) -> float:
        return statistics.median(sum(self._trial()) for _ in range(9))


def predictions(
    backbone: Backbone,
    table: OperatorTable,
    *,
    mixes: int,
    seed: int,
    rounds: int,
    clock: Clock,
    tell: Callable[[Outcome], None],
) -> Report:
    """Of every mix that is drawn; `tell` hears of each. `table` has been measured just now."""
    pace, engine = Pace(backbone, clock), Engine(backbone)
    outcomes, before = [], pace()
    for number in range(mixes):
        found = run_mix(engine, table, draw(seed, number, most_length(backbone)), rounds=rounds, clock=clock)
        after = pace()
        outcomes.append(replace(found, pace=(before + after) / 2))
        before = after
        tell(outcomes[-1])
    return Report(tuple(outcomes))


def line(one: Outcome) -> str:
    """An outcome in words."""
    errors = f"{one.error:+7.1%} (paced {one.paced:+7.1%})"
    seconds = f"predicted {one.predicted_s:7.3f} s measured {one.measured_s:7.3f} s"
    return f"{one.number:3d} {errors} {seconds} {one.policy:10s} {one.passes:3d} passes {one.rows:5d} rows: {one.what}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, draw, run, print."""
    options = _parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    machine = describe(choose_device(options.device))
    print(f"{machine.cpu}, {machine.threads} threads, {machine.device}, load {machine.load_1min}")
    with model_folder(options.model, options.layers) as folder:
        backbone = load_backbone(folder, device=options.device)
        began = time.perf_counter()
        table = measure(backbone, clock=clock)
        print(f"measured in {time.perf_counter() - began:.1f} s; nothing of it changes from here on", flush=True)
        report = predictions(
            backbone,
            table,
            mixes=options.mixes,
            seed=options.seed,
            rounds=options.rounds,
            clock=clock,
            tell=lambda outcome: print(line(outcome), flush=True),
        )
    for told, paced in (("|error|", False), ("at the machine's pace", True)):
        print(f"{told}: median {report.quantile(0.5, paced=paced):.1%}, p90 {report.quantile(0.9, paced=paced):.1%}")
    print(f"bias {report.bias:+.1%}; the worst:")
    for one in sorted(report.outcomes, key=lambda one: -abs(one.error))[:5]:
        print(line(one))
    if options.out is not None:
        document = {"machine": asdict(machine), "outcomes": [asdict(one) for one in report.outcomes]}
        options.out.write_text(json.dumps(document, indent=1))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description="See the module.")
    parser.add_argument("--mixes", type=int, default=MIXES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, help="the first layers only, for a quick look")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor, not the wall's")
    parser.add_argument("--out", type=Path, help="the outcomes as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
