"""What the benchmark found: tables for a person, JSON for a machine.

The JSON file (`schema` 1):

    {"schema": 1,
     "machine":  {...}                     benchmarks.machine.Machine
     "settings": {...}                     benchmarks.bench.Settings
     "races":    [{...}, ...]              benchmarks.race.RaceResult, one a load, with "agrees"
     "memory":   [{"tasks": 8,
                   "layout": "...",
                   "processes": 1,
                   "pss_bytes": 0,
                   "rss_bytes": 0,         benchmarks.memory.Memory
                   "not_run": null}, ...],
     "adapters": {...} or null,            benchmarks.adapters.AdapterCosts
     "chunks":   {...} or null,            benchmarks.chunks.ChunkCosts
     "long":     {...} or null,            benchmarks.long.LongCosts, with "agrees"
     "planning": {...} or null,            benchmarks.planning.PlanningCosts
     "policies": [{...}, ...],             benchmarks.policies.PolicyRace, with "roofline"
     "predictions": {...} or null,         benchmarks.prediction.Report
     "choices":  {...} or null,            benchmarks.choices.Choices
     "growth":   {...} or null,            benchmarks.growth.GrowthCosts, with "nonlinear", "added" and "missed"
     "prefixes": [{...}, ...]}             benchmarks.prefix.PrefixCosts, with "agrees"
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.adapters import AdapterCosts
from benchmarks.choices import Choices
from benchmarks.chunks import ChunkCosts
from benchmarks.growth import GrowthCosts
from benchmarks.long import LongCosts, Side
from benchmarks.machine import Machine
from benchmarks.memory import Memory
from benchmarks.planning import PlanningCosts
from benchmarks.policies import PolicyRace
from benchmarks.prediction import Report
from benchmarks.prefix import SHARED, PrefixCosts
from benchmarks.race import FLOOR_FUSED, PEFT, RaceResult
from benchmarks.timing import Timings, ratio

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Memory of `tasks` tasks laid out in one way."""

    tasks: int
    layout: str
    memory: Memory


@dataclass(slots=True)
class Findings:
    """What has been measured, part by part."""

    races: list[RaceResult] = field(default_factory=list)
    memory: list[Layout] = field(default_factory=list)
    adapters: AdapterCosts | None = None
    chunks: ChunkCosts | None = None
    long: LongCosts | None = None
    planning: PlanningCosts | None = None
    policies: list[PolicyRace] = field(default_factory=list)
    predictions: Report | None = None
    choices: Choices | None = None
    growth: GrowthCosts | None = None
    prefixes: list[PrefixCosts] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        """Whether all sides trained the same."""
        compared = (*self.races, *self.prefixes, *filter(None, [self.long]))
        return all(one.agrees for one in compared)


def show_machine(console: Console, machine: Machine) -> None:
    """One line, and a warning where somebody else was at work."""
    console.print(
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB; device {machine.device}, "
        f"{machine.threads} threads; torch {machine.torch}, transformers {machine.transformers}, peft {machine.peft}; "
        f"commit {machine.commit or 'unknown'}",
        highlight=False,
        soft_wrap=True,
    )
    if machine.load_1min > 1:
        console.print(f"The machine is busy (load {machine.load_1min}): read the ratios, not the seconds.")


def show_race(console: Console, result: RaceResult) -> None:
    """Sides, then ratios, then whether all trained the same."""
    table = Table(title=_title(result), title_justify="left")
    table.add_column("side")
    for name in ("tokens/s", "s a step", "spread", "x peft", "of roofline"):
        table.add_column(name, justify="right")
    yardstick, floor = Timings(result.sides[PEFT].seconds), Timings(result.sides[FLOOR_FUSED].seconds)
    for name, side in result.sides.items():
        own = Timings(side.seconds)
        times, share = f"{ratio(yardstick, own):.2f}", f"{ratio(floor, own):.0%}"
        speed, seconds, spread = f"{side.tokens_per_s:.1f}", f"{side.median_s:.3f}", f"{side.spread:.0%}"
        table.add_row(name, speed, seconds, spread, times, share)
    console.print(table)
    for name, value in result.ratios.items():
        console.print(f"  {name}: {value:.0%}" if "share" in name else f"  {name}: {value:.2f}x", highlight=False)
    verdict = "agree" if result.agrees else "DISAGREE"
    console.print(
        f"  final losses {verdict}: {result.loss_gap:.1e} apart, {result.loss_tolerance:.0e} allowed", highlight=False
    )


def show_memory(console: Console, layouts: Sequence[Layout]) -> None:
    """One row a layout, by number of tasks."""
    table = Table(title="memory after a step of every task, all processes together", title_justify="left")
    table.add_column("tasks", justify="right")
    table.add_column("layout")
    for name in ("PSS GB", "RSS GB"):
        table.add_column(name, justify="right")
    for one in layouts:
        memory = one.memory
        if memory.not_run is not None:
            table.add_row(str(one.tasks), one.layout, "not run", memory.not_run)
        else:
            table.add_row(str(one.tasks), one.layout, f"{memory.pss_bytes / 1e9:.2f}", f"{memory.rss_bytes / 1e9:.2f}")
    console.print(table)


def show_adapters(console: Console, costs: AdapterCosts) -> None:
    """By type and number, by rank, and the mix."""
    counts = list(dict.fromkeys(one.count for one in costs.by_type))
    table = Table(title="what K adapters add to a step, over the backbone's own time", title_justify="left")
    table.add_column("type")
    for count in counts:
        table.add_column(f"K={count}", justify="right")
    own = {one.count: f"{one.own_ms:.0f} ms" for one in costs.by_type}
    table.add_row("(backbone)", *(own[count] for count in counts))
    for name in dict.fromkeys(one.peft_type for one in costs.by_type):
        shares = {one.count: f"{one.share:+.0%}" for one in costs.by_type if one.peft_type == name}
        table.add_row(name, *(shares.get(count, "") for count in counts))
    console.print(table)
    table = Table(title="LoRA by rank: grouped, one by one", title_justify="left")
    for name in ("K", "rank", "grouped", "one by one", "step, one by one / grouped"):
        table.add_column(name, justify="right")
    for rank in costs.by_rank:
        shares_of = (f"{rank.grouped_share:+.0%}", f"{rank.one_by_one_share:+.0%}", f"{rank.speedup:.3f}x")
        table.add_row(str(rank.count), str(rank.rank), *shares_of)
    console.print(table)
    mixed = costs.mixed
    console.print(
        f"one task of each of {len(mixed.types)} types: {mixed.together_ms:.0f} ms together, {mixed.in_turn_ms:.0f} ms "
        f"one after another, {mixed.speedup:.2f}x",
        highlight=False,
    )


def show_chunks(console: Console, costs: ChunkCosts) -> None:
    """By policy, then what the executor itself takes."""
    table = Table(title="non-uniform, by policy: rows that are no token, and time", title_justify="left")
    table.add_column("policy")
    for name in ("no token", "s a step", "x packed"):
        table.add_column(name, justify="right")
    for one in costs.policies:
        seconds = f"{statistics.median(one.seconds):.2f}"
        table.add_row(one.policy, f"{one.wasted:.1%}", seconds, f"{one.times_packed:.2f}")
    table.add_row("each data set padded to 64, 128, 256", f"{costs.wasted_as_published:.1%}", "", "")
    console.print(table)
    told = f"the executor's own share of a step of 8 tasks of 64 tokens: {costs.overhead:.1%}"
    console.print(told, highlight=False)


def show_long(console: Console, costs: LongCosts) -> None:
    """One row a side, over the one in one pass."""
    whole = costs.sides[0]
    table = Table(title=f"one example of {whole.tokens} tokens", title_justify="left")
    table.add_column("side")
    for name in ("s a step", "memory MB", "carried MB", "x time", "x memory"):
        table.add_column(name, justify="right")
    for side in costs.sides:
        shares = (f"{side.step_s / whole.step_s:.2f}", f"{side.grown_bytes / whole.grown_bytes:.2f}")
        table.add_row(*_sizes(side), *shares)
    table.add_row(*_sizes(costs.chunk_alone), "", "")
    console.print(table)
    console.print(f"  losses {'agree' if costs.agrees else 'DISAGREE'}", highlight=False)


def _sizes(side: Side) -> tuple[str, ...]:
    return side.name, f"{side.step_s:.1f}", f"{side.grown_bytes / 1e6:.0f}", f"{side.carried_bytes / 1e6:.0f}"


def show_planning(console: Console, costs: PlanningCosts) -> None:
    """Times, then how far the plans are from the best of all partitions."""
    for what, seconds in costs.seconds.items():
        console.print(f"planning {what}: {1000 * seconds:.0f} ms", highlight=False)
    gaps = sorted(costs.gaps)
    told = f"median {gaps[len(gaps) // 2]:.2%}, p90 {gaps[9 * len(gaps) // 10]:.2%}, largest {gaps[-1]:.2%}"
    console.print(
        f"over the best of all partitions ({len(gaps)} drawn loads): {costs.exact:.0%} equal it; {told}",
        highlight=False,
    )


def show_policies(console: Console, race: PolicyRace) -> None:
    """One row a side; x is its time over muxtune's."""
    title = f"{race.load}, {race.tasks} tasks, {race.tokens:.0f} tokens a step, {race.htasks} hTasks"
    table = Table(title=title, title_justify="left")
    table.add_column("side")
    for name in ("tokens/s", "s a step", "x muxtune", "interval", "no token"):
        table.add_column(name, justify="right")
    for side in race.sides:
        low, high = side.interval
        wasted = f"{side.ineffective:.1%}" if side.ineffective is not None else ""
        figures = (f"{side.tokens_per_s:.0f}", f"{side.median_s:.3f}", f"{side.slower:.2f}", f"{low:.2f}-{high:.2f}")
        table.add_row(side.side, *figures, wasted)
    console.print(table)
    if race.roofline is not None:
        console.print(f"  muxtune's share of the roofline: {race.roofline:.0%}", highlight=False)
    console.print(
        f"  predicted {race.predicted_s:.3f} s ({race.error:+.0%}), planned in {1000 * race.planned_s:.1f} ms",
        highlight=False,
    )


def show_prediction(console: Console, report: Report) -> None:
    """Errors of predictions."""
    for told, paced in (("|error|", False), ("at the machine's pace", True)):
        middle, high = report.quantile(0.5, paced=paced), report.quantile(0.9, paced=paced)
        drawn = f"{told} of {len(report.outcomes)} mixes"
        console.print(f"{drawn}: median {middle:.1%}, p90 {high:.1%}, bias {report.bias:+.1%}", highlight=False)


def show_choices(console: Console, choices: Choices) -> None:
    """What choosing by predictions costs, and what other chunk lengths would."""
    best = f"within 5 % of the best measured in {choices.within:.0%} of {len(choices.choices)} mixes"
    longer = f"median {choices.regret(0.5):.1%} longer, p90 {choices.regret(0.9):.1%}"
    console.print(f"the policy called best: {best}; {longer}", highlight=False, soft_wrap=True)
    if choices.chunk_lengths:
        budgets = ", ".join(f"{budget}: {ratio:.2f}" for budget, ratio in choices.chunk_lengths.items())
        console.print(f"a task alone by its chunk length, predicted, over 512: {budgets}", highlight=False)


def show_growth(console: Console, costs: GrowthCosts) -> None:
    """One line a figure, and the targets that are missed."""
    by_tokens = ", ".join(f"{one.tokens}: {one.step_s:.2f} s" for one in costs.tokens)
    by_tasks = ", ".join(f"{one.tasks}: {one.step_s:.2f} s ({one.times_one:.2f}x)" for one in costs.tasks)
    shares = (
        f"{one.load} {one.planning:.1%} planning, {one.data:.1%} data, {one.bookkeeping:.1%} bookkeeping "
        f"of {one.step_s:.2f} s"
        for one in costs.overheads
    )
    attach = ", ".join(
        f"{1000 * one.attach_s:.0f} ms with {one.attached} attached"
        + f" and {one.examples} examples" * (one.examples > 1)
        for one in costs.attach
    )
    memory = ", ".join(f"{one.tasks}: {one.memory.pss_bytes / 1e9:.2f} GB" for one in costs.memory)
    steady = f"{costs.steady.growth_bytes / 1e6:+.1f} MB from step {costs.steady.steps // 4} to {costs.steady.steps}"
    told = (
        f"a round by its tokens: {by_tokens}; at most {costs.nonlinear:.1%} off the line",
        f"the same tokens of so many tasks: {by_tasks}",
        f"attaching: {attach}",
        f"overhead: {'; '.join(shares)}",
        f"memory by tasks (PSS): {memory}; one adds {costs.added:.2f} times its state",
        f"memory over tiny steps: {steady}",
    )
    for line in (*told, *(f"MISSED: {one}" for one in costs.missed)):
        console.print(line, highlight=False, soft_wrap=True)


def _growth(costs: GrowthCosts) -> dict[str, object]:
    return asdict(costs) | {"nonlinear": costs.nonlinear, "added": costs.added, "missed": costs.missed}


def show_prefix(console: Console, costs: PrefixCosts) -> None:
    """One line a side."""
    agrees = "agree" if costs.agrees else "DISAGREE"
    console.print(f"{costs.kind}: {costs.tokens:.0f} tokens a step, losses {agrees}", highlight=False)
    for side, rows in costs.rows.items():
        told = f"  beginnings {side}: {rows:.0f} rows, {costs.median_s(side):.2f} s"
        console.print(f"{told}, {costs.times:.2f}x" if side == SHARED else told, highlight=False)


def write_json(path: Path, machine: Machine, settings: object, found: Findings) -> None:
    """Write the file described above; its folder is made where it is not there."""
    document = {
        "schema": SCHEMA,
        "machine": asdict(machine),
        "settings": settings,
        "races": [asdict(race) | {"agrees": race.agrees} for race in found.races],
        "memory": [{"tasks": one.tasks, "layout": one.layout} | asdict(one.memory) for one in found.memory],
        "adapters": asdict(found.adapters) if found.adapters is not None else None,
        "chunks": asdict(found.chunks) if found.chunks is not None else None,
        "long": asdict(found.long) | {"agrees": found.long.agrees} if found.long is not None else None,
        "planning": asdict(found.planning) if found.planning is not None else None,
        "policies": [asdict(race) | {"roofline": race.roofline} for race in found.policies],
        "predictions": asdict(found.predictions) if found.predictions is not None else None,
        "choices": asdict(found.choices) if found.choices is not None else None,
        "growth": _growth(found.growth) if found.growth is not None else None,
        "prefixes": [asdict(one) | {"agrees": one.agrees} for one in found.prefixes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _title(result: RaceResult) -> str:
    rounds = len(result.tokens)
    real, trained = sum(result.tokens) / rounds, sum(result.trained_tokens) / rounds
    tokens = f"{real:.0f} tokens a step, {trained:.0f} trained"
    return f"{result.load}: {tokens}, padding {result.padding:.2f}x, {rounds} rounds"
