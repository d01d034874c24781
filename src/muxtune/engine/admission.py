"""Whether a run fits into memory, said with numbers before a weight is loaded.

    process + weights + adapters (with gradients and moments) of the jobs + activations of one micro-batch <= limit

A job that has no room even alone is refused, with the numbers. One that has none beside the others waits until enough
of them have ended (`muxtune.engine.room` says who starts when, `muxtune.engine.waves` does it).

The limit is the run's `memory_limit`, and never more than the machine has free. A micro-batch must hold at least the
widest chunk of any job: as much of a batch as fills the chunk budget. A longer sequence is cut, and its keys and values
and their gradient come on top (`muxtune.models.kv_carry`). What is left above that decides how many rows jobs may bring
together (`fuse_tokens`). The numbers are estimates (`muxtune.models.memory`).

A `memory_limit` that has no room for a job's chunks halves the job's chunk budget until they fit, or are tiny.
The budget is a number that the job's last bits depend on, so it follows from the job, the model and the stated limit -
with the process in quarters of a GiB - and never from what happens to be free, or from who trains beside it.

What is still free then may hold the activations of cut sequences from their forward pass until they train: at most
those of the longest of each job (`keep_tokens`). That spares a second forward pass, and changes no bit.

Where a job does not fit even so, but would if blocks were run again instead of their activations being kept, the run
does that: it takes longer and gives the same bits (`muxtune.models.recompute`). It does not where waiting will do:
a job that waits costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from muxtune.data.prepare import PreparedJob
from muxtune.engine.engine import DEFAULT_CHUNK_TOKENS
from muxtune.engine.loads import most_rows, state_bytes, widest_chunk
from muxtune.engine.planning import memory_model
from muxtune.engine.room import Room, starting
from muxtune.engine.shortage import all_too_large, rounded_up, too_large, what_to_do
from muxtune.errors import AdapterError, ConfigError, MuxTuneError
from muxtune.models.memory import Footprint
from muxtune.plan.memory import MemoryModel
from muxtune.spec.job import JobSpec
from muxtune.spec.peft.targets import refuse_unmatched
from muxtune.spec.schedule import total_steps

_LEAST_CHUNK = 64  # tokens; smaller chunks cost more time than they save memory
_PROCESS_SHARE = 50  # the part of a process by which the same one may be larger the next time
_PROCESS_STEP = 2**28  # bytes: two processes that do the same differ by less, mostly


@dataclass(frozen=True, slots=True)
class JobSize:
    """What one job brings: its longest sequence (virtual tokens included), rows of its widest chunk at most, its
    adapter, and the optimizer steps that it has left."""

    job: JobSpec
    longest: int
    widest: int
    parameters: int
    state_bytes: int
    activation_bytes: int  # of its widest chunk alone
    flops_per_token: int  # of the adapter, a trained token
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # its chunk budget, where it starts now
    carried_bytes: int = 0  # keys and values of its longest sequence, where that is cut, and their gradient
    rounds: int = 0

    @property
    def held_bytes(self) -> int:
        """What it holds whoever runs."""
        return self.state_bytes + self.carried_bytes

    @property
    def alone_bytes(self) -> int:
        """What it takes beside the process and the base model."""
        return self.held_bytes + self.activation_bytes

    @property
    def kept_rows(self) -> int:
        """Of its longest sequence, where that is cut; a pair of dpo runs twice in any case."""
        return self.longest if self.carried_bytes and self.job.method != "dpo" else 0

    @property
    def warning(self) -> str | None:
        """What is said of a lowered chunk budget."""
        if self.chunk_tokens == DEFAULT_CHUNK_TOKENS:
            return None
        return (
            f"memory_limit has room for chunks of {self.chunk_tokens} tokens, not {DEFAULT_CHUNK_TOKENS}: "
            "the result may differ in its last bits from a run with more"
        )


@dataclass(frozen=True, slots=True)
class Admission:
    """`refused` jobs cannot run at all; those of `sizes` start together, at `fuse_tokens` rows a micro-batch and with
    recomputation where `model` says so, while `keep_tokens` rows of cut sequences keep their activations; the `waiting`
    follow them. `short` are those of the refused that want memory; at a memory_limit of `least_bytes` each job has
    enough, if others wait for it."""

    model: Footprint
    limit_bytes: int
    process_bytes: int
    sizes: tuple[JobSize, ...]
    fuse_tokens: int
    peak_bytes: int
    refused: tuple[tuple[JobSpec, MuxTuneError], ...] = ()
    short: tuple[JobSize, ...] = ()
    least_bytes: int = 0
    waiting: tuple[JobSize, ...] = ()
    keep_tokens: int = 0

    @property
    def room(self) -> Room:
        return Room(self.model, self.limit_bytes, self.process_bytes)

    @property
    def memory(self) -> MemoryModel:
        """What was reckoned with, as the planner knows it."""
        return memory_model(
            self.model,
            process_bytes=self.process_bytes,
            limit_bytes=self.limit_bytes,
            keep_tokens=self.keep_tokens,
        )

    @property
    def refusals(self) -> tuple[tuple[JobSpec, MuxTuneError], ...]:
        """`refused`, where those that want memory are told as one."""
        names = {size.job.name for size in self.short}
        if len(names) < 2:
            return self.refused
        others = [one for one in self.refused if one[0].name not in names]
        return (*others, (self.short[0].job, all_too_large(self)))


def admit(
    prepared: Sequence[PreparedJob],
    model: Footprint,
    *,
    dtype: torch.dtype,
    limit_bytes: int,
    process_bytes: int,
    memory_limit: int | None = None,
    done: Mapping[str, int] | None = None,
) -> Admission:
    """Which jobs fit, as far as is known before any has been loaded; with recomputation if more do so.

    `memory_limit` is what the config states; `done` are the steps of jobs that go on.
    """
    room = None
    if memory_limit is not None:
        room = _room(memory_limit, process_bytes, model)
    budgets = {job.job.name: _chunk_tokens(job, model, dtype, room) for job in prepared}
    kept = _admit(prepared, model, dtype, limit_bytes, process_bytes, budgets, done or {})
    lean = model.recomputed()
    if lean.row_bytes >= model.row_bytes:
        lean = model
    elif kept.refused:
        again = _admit(prepared, lean, dtype, limit_bytes, process_bytes, budgets, done or {})
        if len(again.refused) < len(kept.refused):
            kept = again
        else:
            kept = replace(kept, refused=again.refused, short=again.short)  # who is told what the least would be
    return _advised(kept, prepared, lean, dtype) if kept.short else kept


def _advised(found: Admission, prepared: Sequence[PreparedJob], lean: Footprint, dtype: torch.dtype) -> Admission:
    """The same with what to do about it, in numbers."""
    short = {size.job.name for size in found.short}
    fitting = short | {size.job.name for size in (*found.sizes, *found.waiting)}
    sized = [one for one in prepared if one.job.name in fitting]
    found = replace(found, least_bytes=_least_limit(sized, lean, dtype, found.process_bytes))
    hint = what_to_do(found)
    refused = tuple(
        (job, ConfigError(error.message, where=error.where, hint=hint) if job.name in short else error)
        for job, error in found.refused
    )
    return replace(found, refused=refused)


def _least_limit(prepared: Sequence[PreparedJob], lean: Footprint, dtype: torch.dtype, process_bytes: int) -> int:
    """A memory_limit, in a round number, at which each of these fits alone: with the chunks that it leaves them.

    A higher limit may give larger chunks, which need more in turn; budgets only grow with it, and have an end.
    """
    limit = 0
    while True:
        room = _room(limit, process_bytes, lean)
        sizes = [_size(job, lean, dtype, _chunk_tokens(job, lean, dtype, room)) for job in prepared]
        needed = process_bytes + lean.weights_bytes + max(size.alone_bytes for size in sizes)
        if needed <= limit:
            return limit
        limit = rounded_up(needed + process_bytes // _PROCESS_SHARE)


def _room(memory_limit: int, process_bytes: int, model: Footprint) -> int:
    """What a stated limit leaves for an adapter and its activations."""
    return memory_limit + (-process_bytes // _PROCESS_STEP) * _PROCESS_STEP - model.weights_bytes


def _admit(
    prepared: Sequence[PreparedJob],
    model: Footprint,
    dtype: torch.dtype,
    limit_bytes: int,
    process_bytes: int,
    budgets: Mapping[str, int],
    done: Mapping[str, int],
) -> Admission:
    room = Room(model, limit_bytes, process_bytes)
    able: list[JobSize] = []
    refused: list[tuple[JobSpec, MuxTuneError]] = []
    short: list[JobSize] = []
    for job in prepared:
        try:
            size = _size(job, model, dtype, budgets[job.job.name])
        except MuxTuneError as error:  # targets that match nothing
            refused.append((job.job, error))
            continue
        if room.fits([size]):
            able.append(replace(size, rounds=total_steps(job.job, job.data.groups) - done.get(job.job.name, 0)))
        else:
            short.append(size)
            refused.append((size.job, too_large(size, room)))
    first = starting([], able, room.fits)
    names = {size.job.name for size in first}
    return Admission(
        model,
        limit_bytes,
        process_bytes,
        tuple(first),
        room.fuse_tokens(first),
        room.peak_bytes(first),
        tuple(refused),
        tuple(short),
        waiting=tuple(size for size in able if size.job.name not in names),
        keep_tokens=room.keep_tokens(first),
    )


def _size(prepared: PreparedJob, model: Footprint, dtype: torch.dtype, chunk_tokens: int) -> JobSize:
    job = prepared.job
    rows, seen = _longest(prepared)
    parameters = job.peft.parameters(model.places)
    _check_targets(job, model)
    if not parameters:
        raise AdapterError(
            f"{job.peft.label} finds nothing to train in the base model",
            where=f"jobs.{job.name}.peft",
            hint="choose another type, or other target_modules",
        )
    widest = widest_chunk(job, most_rows(job, prepared.data.train), chunk_tokens)
    return JobSize(
        job,
        seen,
        widest,
        parameters,
        state_bytes(job.peft, model.places, dtype),
        model.activation_bytes(widest, seen),
        job.peft.flops_per_token(model.places),
        chunk_tokens,
        _carried_bytes(job, model, rows, seen, chunk_tokens),
    )


def _chunk_tokens(prepared: PreparedJob, model: Footprint, dtype: torch.dtype, room: int | None) -> int:
    """The job's chunk budget, where `room` is all that its adapter and activations may take."""
    job, (rows, seen) = prepared.job, _longest(prepared)
    budget, step_rows = DEFAULT_CHUNK_TOKENS, most_rows(job, prepared.data.train)
    while room is not None and budget > _LEAST_CHUNK:
        held = state_bytes(job.peft, model.places, dtype) + _carried_bytes(job, model, rows, seen, budget)
        if model.activation_bytes(widest_chunk(job, step_rows, budget), seen) <= room - held:
            break
        budget //= 2
    return budget


def _carried_bytes(job: JobSpec, model: Footprint, rows: int, seen: int, chunk_tokens: int) -> int:
    """Of the longest sequence, or of both of a pair, where it is cut."""
    cut = rows > max(chunk_tokens, job.peft.virtual_rows + 1)
    return job.group_size * seen * model.position_bytes if cut else 0


def _longest(prepared: PreparedJob) -> tuple[int, int]:
    """Rows of the longest sequence, and the positions that its last token sees."""
    longest = max(sequence.input_tokens for sequence in prepared.data.train)
    return longest + prepared.job.peft.virtual_rows, longest + prepared.job.peft.lead


def _check_targets(job: JobSpec, model: Footprint) -> None:
    try:
        refuse_unmatched(job.peft, model.places)
    except AdapterError as error:
        raise AdapterError(error.message, where=f"jobs.{job.name}.peft.{error.where}", hint=error.hint) from None
