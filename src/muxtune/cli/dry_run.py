"""`muxtune train --dry-run`: what the run would be, without loading a weight or leaving anything in its output folder.

It refuses what `muxtune train` refuses before it loads the base model. What only the loaded model shows - the probe of
an architecture that was not tried, an `adapter_path` that holds another adapter than the job's - it does not see.

Times are estimates, said as such. Where what operators cost here is known, the plan tells how long all jobs take
together (`muxtune.cli.eta`). Otherwise it is the products of their steps at the rate that a matrix product of the
model's width reaches on this machine now, times a factor for everything else (docs/log.md): the first step will tell
better. A job's share is that of its products either way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from muxtune.cli.errors import print_error
from muxtune.cli.eta import predicted_s
from muxtune.cli.terminal import console, duration, grid, print_json, tell
from muxtune.engine.admission import Admission, JobSize
from muxtune.engine.begin import Failure, PlannedJob
from muxtune.engine.load import choose_device, choose_dtype
from muxtune.engine.shortage import size_text
from muxtune.engine.task_folder import load_checkpoint
from muxtune.engine.training import TrainingRun
from muxtune.errors import CheckpointError
from muxtune.models.memory import Footprint
from muxtune.spec.schedule import total_steps

if TYPE_CHECKING:
    from muxtune.data.prepare import PreparedJob

_BESIDE_PRODUCTS = 1.5  # the time of a step over that of its products, measured on SmolLM2-135M
_RATE_S = 0.2
_RATE_ROWS = 128  # a product of a millisecond or two, so that the best of many is one that nothing disturbed


@dataclass(frozen=True, slots=True)
class Estimate:
    """One job. Tokens are those of one pass over its data; `products` are the floating-point operations of those that
    it has left; `time_s` is its own share of the run; `waits` says that it starts when others have ended."""

    name: str
    begins: str
    examples: int
    sequences: int
    tokens: int
    trained_tokens: int
    longest: int
    steps: int
    steps_done: int
    parameters: int
    adapter_bytes: int
    products: float
    warnings: tuple[str, ...]
    waits: bool = False
    time_s: float = 0.0


def print_dry_run(training: TrainingRun, *, as_json: bool) -> int:
    """0, or 1 where --keep-going lets a job fail alone. Raises MuxTuneError for what would stop the run."""
    planned, refused = training.plan()
    training.check_output()
    base = training.base()
    prepared, failures = training.prepare(planned, base)
    failures = [*refused, *failures]
    admission = training.admit(prepared, base, planned) if prepared else None
    if admission is not None:
        failures = failures + [Failure(job, error) for job, error in admission.refused]
    estimates, damaged = _estimates(planned, prepared, admission)
    if damaged and not training.keep_going:
        raise damaged[0].error
    failures = [*failures, *damaged]
    planned_s = None
    if admission is not None:
        planned_s = predicted_s(training, base, prepared, admission, {one.name: one.steps_done for one in estimates})
        estimates = _timed(estimates, planned_s, training, admission.model)
    finished = [plan.job.name for plan in planned if plan.begin == "finished"]
    for failure in failures:
        print_error(failure.named)
    if as_json:
        print_json(_as_json(estimates, finished, failures, admission, planned_s is not None))
    else:
        _print(estimates, finished, admission, planned_s is not None, training.layout.size)
    return 1 if failures else 0


def _estimates(
    planned: Sequence[PlannedJob],
    prepared: Sequence[PreparedJob],
    admission: Admission | None,
) -> tuple[list[Estimate], list[Failure]]:
    """Of the jobs that can begin; and those whose checkpoints are all damaged."""
    if admission is None or not admission.sizes:
        return [], []
    sizes = {size.job.name: size for size in (*admission.sizes, *admission.waiting)}
    waiting = {size.job.name for size in admission.waiting}
    plans = {plan.job.name: plan for plan in planned}
    estimates: list[Estimate] = []
    damaged: list[Failure] = []
    for job in prepared:
        if (size := sizes.get(job.job.name)) is None:
            continue
        plan = plans[job.job.name]
        try:
            estimate = _estimate(plan, job, size, admission.model)
            estimates.append(replace(estimate, waits=estimate.name in waiting))
        except CheckpointError as error:
            damaged.append(Failure(job.job, error, plan.progress.step))
    return estimates, damaged


def _timed(
    estimates: Sequence[Estimate], planned_s: float | None, training: TrainingRun, model: Footprint
) -> list[Estimate]:
    """With times: shares of what the plan says or, without one, of what products take here."""
    products = sum(one.products for one in estimates)
    if not products:
        return list(estimates)
    whole_s = products / _products_per_s(training, model) * _BESIDE_PRODUCTS if planned_s is None else planned_s
    return [replace(one, time_s=whole_s * one.products / products) for one in estimates]


def _estimate(plan: PlannedJob, prepared: PreparedJob, size: JobSize, model: Footprint) -> Estimate:
    job, report = prepared.job, prepared.data.report
    found = load_checkpoint(plan.folder) if plan.begin == "continue" else None
    done = found.state.step if found is not None else 0
    groups = prepared.data.groups
    rows = report.train_tokens + report.train_sequences * job.peft.virtual_rows
    steps = total_steps(job, groups)
    share = (steps - done) * min(job.effective_batch, groups) / groups
    flops = share * _flops(rows, report.trained_tokens, size, model)
    if job.method == "dpo":  # at most once the backbone alone, and each time the head once more
        flops += (
            min(1, share) * 2 * (report.train_tokens * model.layer_weights + report.trained_tokens * model.head_weights)
        )
        flops += share * 2 * report.trained_tokens * model.head_weights
    return Estimate(
        job.name,
        plan.begin,
        sum(file.examples for file in report.files[: len(job.datasets)]) - report.split_off,
        report.train_sequences,
        report.train_tokens,
        report.trained_tokens,
        report.lengths.longest,
        steps,
        done,
        size.parameters,
        size.state_bytes,
        flops,
        (*plan.warnings, *prepared.warnings, *filter(None, [size.warning])),
    )


def _flops(rows: int, trained_tokens: int, size: JobSize, model: Footprint) -> float:
    """Of the products: forward and input gradient, 2 each a weight; no weight gradient but the adapter's. With
    recomputation the layers run forward twice, and so does the adapter, whose forward pass is a third of it."""
    layers = 4 * model.layer_weights + size.flops_per_token
    if model.recompute:
        layers += 2 * model.layer_weights + size.flops_per_token // 3
    return rows * layers + trained_tokens * 4 * model.head_weights


def _products_per_s(training: TrainingRun, model: Footprint) -> float:
    """Floating-point operations a second of a product as wide as the model's: the best of a fifth of a second."""
    run = training.run
    device = choose_device(run.device)
    dtype = choose_dtype(run.dtype, device)
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    inner, outer = max(model.linears.values(), key=lambda shape: shape[0] * shape[1])
    rows = torch.ones(_RATE_ROWS, inner, dtype=dtype, device=device)
    weight = torch.ones(inner, outer, dtype=dtype, device=device)
    float((rows @ weight)[0, 0])  # warm
    began_s, best_s = time.perf_counter(), float("inf")
    while (start_s := time.perf_counter()) - began_s < _RATE_S:
        float((rows @ weight)[0, 0])  # waits for the device
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _RATE_ROWS * inner * outer / best_s


def _print(
    estimates: Sequence[Estimate], finished: Sequence[str], admission: Admission | None, from_plan: bool, ranks: int
) -> None:
    table = grid("job", "examples", "tokens", "trained", "longest", "steps", "parameters", "memory", "time")
    for one in estimates:
        steps = f"{one.steps_done}->{one.steps}" if one.steps_done else str(one.steps)
        counts = (one.examples, one.tokens, one.trained_tokens, one.longest)
        cells = (*(f"{count:,}" for count in counts), steps, f"{one.parameters:,}", size_text(one.adapter_bytes))
        table.add_row(one.name, *cells, f"~{duration(one.time_s)}")
    out = console(sys.stdout)
    if estimates:
        out.print(table, soft_wrap=True)
    for name in finished:
        print(f"{name}: completed earlier")
    for one in estimates:
        for warning in one.warnings:
            tell(f"{one.name} warning: {warning}")
    if admission is not None and estimates:
        print(f"\nmemory{' of a rank' * (ranks > 1)}: about {_memory(admission)}")
        if admission.waiting:
            names = ", ".join(size.job.name for size in admission.waiting)
            print(
                f"jobs: {len(admission.sizes)} start at once, and that is their memory; "
                f"{len(admission.waiting)} wait for memory and start as others end: {names}"
            )
        whole = sum(one.time_s for one in estimates)
        source = (
            "predicted by the plan, from what operators cost here (muxtune plan)"
            if from_plan
            else "estimated from a matrix product measured just now"
        )
        print(f"time: about {duration(whole)} in all, {source}")


def _memory(admission: Admission) -> str:
    states = sum(size.state_bytes for size in admission.sizes)
    carried = sum(size.carried_bytes for size in admission.sizes)
    held = admission.process_bytes + admission.model.weights_bytes + states + carried
    cut = f", keys and values of cut sequences {size_text(carried)}" if carried else ""
    kept = f" and {admission.keep_tokens:,} kept of cut sequences" if admission.keep_tokens else ""
    return (
        f"{size_text(admission.peak_bytes)} of {size_text(admission.limit_bytes)}: "
        f"base model {size_text(admission.model.weights_bytes)}, adapters {size_text(states)}{cut}, activations "
        f"{size_text(admission.peak_bytes - held)} (up to {admission.fuse_tokens:,} tokens at once{kept}"
        f"{', computed twice to save memory' * admission.model.recompute}), "
        f"process {size_text(admission.process_bytes)}"
    )


def _as_json(
    estimates: Sequence[Estimate],
    finished: Sequence[str],
    failures: Sequence[Failure],
    admission: Admission | None,
    from_plan: bool,
) -> dict[str, object]:
    memory = None
    if admission is not None:
        memory = {
            "limit_bytes": admission.limit_bytes,
            "peak_bytes": admission.peak_bytes,
            "base_model_bytes": admission.model.weights_bytes,
            "process_bytes": admission.process_bytes,
            "adapter_bytes": sum(size.state_bytes for size in admission.sizes),
            "carried_bytes": sum(size.carried_bytes for size in admission.sizes),
            "fuse_tokens": admission.fuse_tokens,
            "keep_tokens": admission.keep_tokens,
            "recompute": admission.model.recompute,
            "waiting": [size.job.name for size in admission.waiting],
        }
    return {
        "jobs": [asdict(one) for one in estimates],
        "finished": list(finished),
        "failed": [{"name": failure.job.name, "error": failure.told} for failure in failures],
        "memory": memory,
        "time_s": sum(one.time_s for one in estimates),
        "time_from": "plan" if from_plan else "product",
    }
