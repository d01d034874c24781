"""What a job brings to a round, as the planner sees it: its `TaskLoad`, from its data and its spec alone.

A typical optimizer step stands for all: the middle one, by rows, of the next few, in the task's own order and chunks.
What a plan must never exceed - the widest chunk, the longest sequence, keys and values carried - are bounds over every
step there can be.

The second half goes the other way: from a schedule to the loads that each of its passes has, so that what ran can be
laid beside what was predicted for exactly that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from muxtune.data.sampler import Sampler
from muxtune.data.types import TokenSequence
from muxtune.engine.decode import DecodeSource
from muxtune.engine.task import Task, participant_of
from muxtune.plan.cost import CostModel
from muxtune.plan.loads import BARE, ChunkLoad, Span, TaskLoad, label_of
from muxtune.plan.round import Participant
from muxtune.plan.types import LossSpec, MicroBatch, RoundSchedule, SequenceRef, WorkItem, WorkKind
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import PeftBase, Place
from muxtune.spec.schedule import total_steps

LOOKED_AT = 5  # optimizer steps, of which the middle one is the typical one

Members = list[tuple[TaskLoad, ChunkLoad]]
Sources = Mapping[str, Sequence[TokenSequence] | DecodeSource]


def load_of(
    job: JobSpec,
    sequences: Sequence[TokenSequence],
    chunk_tokens: int,
    places: Sequence[Place],
    *,
    done: int = 0,
    total: int | None = None,
    keep_tokens: int = 0,
    shares: bool | None = None,
    held_bytes: int | None = None,
) -> TaskLoad:
    """Of a job on its training sequences, at least one. `places`: every attach point of the base model.

    `done`, `total`: optimizer steps that have been, and that there are in all (None: as the job says). `keep_tokens`:
    rows whose activations may be kept between passes, as if nobody else's were. `shares`: whether prefixes are shared
    (None: as the job says). `held_bytes`: of the adapter, its gradient and moments (None: in fp32).
    """
    group = job.group_size
    groups = len(sequences) // group
    total = total_steps(job, groups) if total is None else total
    shares = job.share_prefixes if shares is None else shares
    sampler = Sampler(groups, job.effective_batch, job.seed, shuffle=job.shuffle)
    batches = [sampler.batch(done + ahead) for ahead in range(LOOKED_AT)]
    steps = [_step(job, sequences, batch, chunk_tokens, keep_tokens, shares) for batch in batches]
    chunks = sorted(steps, key=lambda chunks: sum(chunk.rows for chunk in chunks))[LOOKED_AT // 2]
    budget = max(chunk_tokens, job.peft.virtual_rows + 1)
    longest = max(one.input_tokens for one in sequences)
    cut = longest + job.peft.virtual_rows > budget
    return TaskLoad(
        job.name,
        chunks,
        label_of(job.peft),
        job.peft.parameters(places),
        state_bytes(job.peft, places) if held_bytes is None else held_bytes,
        widest_chunk(job, most_rows(job, sequences), chunk_tokens),
        group * (longest + job.peft.lead) if cut else 0,
        max(0, total - done),
        points_of(job.peft, places),
        longest + job.peft.lead,
        longest + job.peft.lead if cut and job.method != "dpo" else 0,
    )


def load_of_task(task: Task, places: Sequence[Place], *, keep_tokens: int = 0) -> TaskLoad:
    """Of an attached task with data, from the step that is next."""
    return load_of(
        task.job,
        task.data.train,
        task.chunk_tokens,
        places,
        done=task.step,
        total=task.total_steps,
        keep_tokens=keep_tokens,
        shares=task.shares,
        held_bytes=state_bytes(task.job.peft, places, task.adapter.parameters.values.dtype),
    )


def state_bytes(peft: PeftBase, places: Sequence[Place], dtype: torch.dtype = torch.float32) -> int:
    """Of an adapter, its gradient and moments, on a base model of weights in `dtype`: fp32, or finer where they are."""
    return peft.state_bytes(places) * (torch.promote_types(dtype, torch.float32).itemsize // 4)


def most_rows(job: JobSpec, sequences: Sequence[TokenSequence]) -> int:
    """Of any optimizer step: those of its longest groups."""
    size = job.group_size
    rows = (
        np.array([one.input_tokens for one in sequences], np.int64).reshape(-1, size).sum(axis=1)
        + size * job.peft.virtual_rows
    )
    return int(np.sort(rows)[-job.effective_batch :].sum())


def widest_chunk(job: JobSpec, step_rows: int, chunk_tokens: int) -> int:
    """Rows of the largest chunk at most, where no step has more than `step_rows`."""
    return min(max(chunk_tokens, job.peft.virtual_rows + 1), step_rows)


def points_of(peft: PeftBase, places: Iterable[Place]) -> int:
    """Attach points where an adapter trains something."""
    return sum(peft.parameters((place,)) > 0 for place in places)


def members_of(
    batch: MicroBatch, tasks: Mapping[str, Task], loads: Mapping[str, TaskLoad], sources: Sources
) -> Members:
    """Who runs what in a pass of a schedule; `loads` are those of its tasks. Rows that decode are not among them."""
    found: Members = []
    for item in batch.items:
        source = sources[item.source]
        if isinstance(source, DecodeSource):
            continue
        peft = tasks[item.task].job.peft if item.task is not None else None
        chunk = replace(_chunk(item, source, peft), resumes=batch.resumes)
        found.append((loads[item.task] if item.task is not None else TaskLoad("", (chunk,), BARE), chunk))
    return found


def pass_s(
    batch: MicroBatch, cost: CostModel, tasks: Mapping[str, Task], loads: Mapping[str, TaskLoad], sources: Sources
) -> float:
    """Predicted seconds of a pass of a schedule; 0 where nothing in it is known. `cost` must know whether it
    recomputes."""
    members = members_of(batch, tasks, loads, sources)
    return cost.pass_cost(members, width=batch.width).total_s(cost.layers) if members else 0.0


def predicted_s(
    schedule: RoundSchedule,
    cost: CostModel,
    tasks: Mapping[str, Task],
    loads: Mapping[str, TaskLoad],
    sources: Sources,
) -> list[float]:
    """Seconds of each action of a schedule."""
    return [
        pass_s(action, cost, tasks, loads, sources)
        if isinstance(action, MicroBatch)
        else cost.step_s(loads[action.task])
        for action in schedule.actions
    ]


def _step(
    job: JobSpec,
    sequences: Sequence[TokenSequence],
    groups: Sequence[int],
    chunk_tokens: int,
    keep_tokens: int,
    shares: bool,
) -> tuple[ChunkLoad, ...]:
    """The chunks of one optimizer step."""
    size = job.group_size
    indices = [size * group + place for group in groups for place in range(size)]
    brought = participant_of(job, job.name, sequences, indices, chunk_tokens, size, shares=shares)
    resumed = _resumed(brought, keep_tokens)
    return tuple(
        replace(_chunk(_item(job, brought, number), sequences, job.peft), resumes=number in resumed)
        for number in range(len(brought.chunks))
    )


def _resumed(brought: Participant, keep_tokens: int) -> frozenset[int]:
    """The chunks that train from what was kept, in a round of this participant alone (`muxtune.plan.round`)."""
    found: set[int] = set()
    number = 0
    while number < len(brought.chunks):
        depth = brought.mirrored(number)
        if depth and sum(map(brought.rows, range(number, number + depth))) <= keep_tokens:
            found.update(range(number + depth + 1, number + 2 * depth + 1))
            number += 2 * depth
        number += 1
    return frozenset(found)


def _item(job: JobSpec, brought: Participant, number: int) -> WorkItem:
    """A chunk as a round takes it (`muxtune.plan.round`)."""
    kind: WorkKind = "train" if number not in brought.carried else "score" if brought.loss == "dpo" else "carry"
    loss = LossSpec(brought.denominator, brought.loss, brought.beta)
    return WorkItem(job.name, kind, brought.source, brought.chunks[number], loss)


def _chunk(item: WorkItem, source: Sequence[TokenSequence], peft: PeftBase | None) -> ChunkLoad:
    spans = tuple(_span(ref, peft) for ref in item.sequences)
    trained = sum(_trained(source[ref.index], ref) for ref in item.sequences) if item.kind != "carry" else 0
    trains = item.kind == "train"
    compared = trained if trains and item.loss is not None and item.loss.kind == "dpo" else 0
    return ChunkLoad(spans, trained, trains, compared, shared=sum(ref.shared for ref in item.sequences))


def _span(ref: SequenceRef, peft: PeftBase | None) -> Span:
    virtual, lead = (peft.virtual_rows, peft.lead) if peft is not None else (0, 0)
    return Span(ref.rows(virtual), lead + ref.stop)


def _trained(sequence: TokenSequence, ref: SequenceRef) -> int:
    """Rows that predict a trained token (`muxtune.engine.packing`), those apart that a sequence before it has too."""
    return int(np.count_nonzero(sequence.mask[max(ref.start + 1, ref.shared) : ref.stop + 1]))
