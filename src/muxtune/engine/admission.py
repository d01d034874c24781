"""Whether a run fits into memory, said with numbers before a weight is loaded.

    process + weights + adapters (with gradients and moments) of all jobs + activations of one micro-batch <= limit

The limit is the run's `memory_limit`, and never more than the machine has free. A micro-batch must hold at least the
widest chunk of any job: its longest sequence, or as much of a batch as fills the chunk budget. What is left above that
decides how many rows jobs may bring together (`fuse_tokens`). The numbers are estimates (`muxtune.models.memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from muxtune.data.prepare import PreparedJob
from muxtune.engine.engine import DEFAULT_CHUNK_TOKENS, DEFAULT_FUSE_TOKENS
from muxtune.errors import AdapterError, ConfigError, MuxTuneError
from muxtune.models.memory import Footprint
from muxtune.spec.job import JobSpec
from muxtune.spec.peft.targets import refuse_ends


@dataclass(frozen=True, slots=True)
class JobSize:
    """What one job brings: its longest sequence (virtual tokens included), rows of its widest chunk at most, and its
    adapter."""

    job: JobSpec
    longest: int
    widest: int
    parameters: int
    state_bytes: int
    activation_bytes: int  # of its widest chunk alone
    flops_per_token: int  # of the adapter, a trained token


@dataclass(frozen=True, slots=True)
class Admission:
    """`refused` jobs cannot run at all; the others fit together at `fuse_tokens` rows a micro-batch."""

    model: Footprint
    limit_bytes: int
    process_bytes: int
    sizes: tuple[JobSize, ...]
    fuse_tokens: int
    peak_bytes: int
    refused: tuple[tuple[JobSpec, MuxTuneError], ...] = ()


def admit(
    prepared: Sequence[PreparedJob],
    model: Footprint,
    *,
    dtype: torch.dtype,
    limit_bytes: int,
    process_bytes: int,
) -> Admission:
    """Which jobs fit, as far as is known before any of them has been loaded."""
    sizes: list[JobSize] = []
    refused: list[tuple[JobSpec, MuxTuneError]] = []
    for job in prepared:
        try:
            sizes.append(_size(job, model, dtype))
        except MuxTuneError as error:  # targets that match nothing
            refused.append((job.job, error))
    held = process_bytes + model.weights_bytes + sum(size.state_bytes for size in sizes)
    free = limit_bytes - held
    fitting = [size for size in sizes if size.activation_bytes <= free]
    for size in sizes:
        if size.activation_bytes > free:
            refused.append((size.job, _too_large(size, model, sizes, limit_bytes, process_bytes)))
    if not fitting:
        return Admission(model, limit_bytes, process_bytes, (), 0, held, tuple(refused))
    longest = max(size.longest for size in fitting)
    widest = max(size.widest for size in fitting)
    fuse_tokens = max(widest, min(DEFAULT_FUSE_TOKENS, model.rows_within(free, longest)))
    used = min(fuse_tokens, sum(size.widest for size in fitting))
    return Admission(
        model,
        limit_bytes,
        process_bytes,
        tuple(fitting),
        fuse_tokens,
        held + model.activation_bytes(used, longest),
        tuple(refused),
    )


def _size(prepared: PreparedJob, model: Footprint, dtype: torch.dtype) -> JobSize:
    job = prepared.job
    longest = max(len(sequence) for sequence in prepared.data.train)
    rows, seen = longest + job.peft.virtual_rows, longest + job.peft.lead
    widest = max(rows, min(DEFAULT_CHUNK_TOKENS, rows * job.effective_batch))
    parameters = job.peft.parameters(model.places)
    _refuse_ends(job, model)
    unknown = job.peft.unmatched(model.places)
    if unknown or not parameters:
        raise AdapterError(
            f"its peft names nothing in the base model: {', '.join(map(repr, unknown)) or job.peft.type}",
            where=f"jobs.{job.name}.peft",
        )
    wide = torch.promote_types(dtype, torch.float32).itemsize // 4
    return JobSize(
        job,
        seen,
        widest,
        parameters,
        job.peft.state_bytes(model.places) * wide,
        model.activation_bytes(widest, seen),
        job.peft.flops_per_token(model.places),
    )


def _refuse_ends(job: JobSpec, model: Footprint) -> None:
    try:
        refuse_ends(job.peft, model.places)
    except AdapterError as error:
        raise AdapterError(error.message, where=f"jobs.{job.name}.peft", hint=error.hint) from None


def _too_large(
    size: JobSize, model: Footprint, sizes: Sequence[JobSize], limit_bytes: int, process_bytes: int
) -> ConfigError:
    states = sum(one.state_bytes for one in sizes)
    left = limit_bytes - process_bytes - model.weights_bytes - states
    return ConfigError(
        f"does not fit into memory: its longest batch ({size.widest:,} tokens at once) needs about "
        f"{size_text(size.activation_bytes)}; of {size_text(limit_bytes)} there are {size_text(max(0, left))} left "
        f"beside the process ({size_text(process_bytes)}), the base model ({size_text(model.weights_bytes)}) and "
        f"{len(sizes)} adapter{'s' * (len(sizes) != 1)} ({size_text(states)})",
        where=f"jobs.{size.job.name}",
        hint="lower max_length or the number of jobs, or give it more memory (memory_limit, another machine)",
    )


def size_text(size_bytes: int) -> str:
    """1536000 -> "1.5 MB": three digits at most before the point, decimal units."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
