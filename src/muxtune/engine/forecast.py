"""What the plans of a run are made on, before it begins: nothing is trained and no folder of the run is touched.

Data are read and admission asked as for a run. What operators cost is looked up for the model's shapes; only where it
is not known is the base model loaded, to measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from muxtune.data.prepare import PreparedJob
from muxtune.engine.admission import Admission, admit
from muxtune.engine.load import choose_device, choose_dtype
from muxtune.engine.loads import load_of
from muxtune.engine.local import LocalEngine
from muxtune.engine.training import TrainingRun
from muxtune.models.memory import footprint, memory_here
from muxtune.models.sources import ModelFolder
from muxtune.plan.loads import TaskLoad
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable

_NO_LIMIT = 2**62  # bytes: more than any job wants


@dataclass(frozen=True, slots=True)
class Forecast:
    """Attributes:
    loads: of the jobs that start together, in the order of the config.
    waiting: names of those that wait for memory, and are not planned yet.
    most_rows: that a pass may have.
    recompute: whether activations are computed twice.
    smaller: jobs whose chunks memory_limit makes smaller, and to how many tokens.
    evaluates: whether any of them holds something out.
    """

    loads: tuple[TaskLoad, ...]
    waiting: tuple[str, ...]
    table: OperatorTable
    memory: MemoryModel
    most_rows: int
    recompute: bool
    smaller: tuple[tuple[str, int], ...] = ()
    evaluates: bool = False


def forecast(training: TrainingRun, notice: Callable[[str], None], *, here: bool = True) -> Forecast:
    """Of a run that would begin now, all jobs from their first step. `notice` is told what takes a while.

    Not `here`: for other hardware. Then neither memory_limit nor the memory of this machine counts: no job waits or is
    refused for it, chunks are as large as can be, and no activation of a cut sequence is kept.

    Raises what the run would: ConfigError, DataError, and others before anything is loaded.
    """
    if training.run.threads is not None:
        torch.set_num_threads(training.run.threads)
    training.overwrite = True  # folders in the way are none of a plan's business
    planned, _ = training.plan()
    base = training.base()
    prepared, _ = training.prepare(planned, base)
    admission = training.admit(prepared, base, planned) if here else _unbounded(training, prepared, base)
    table = training.known_table(base) or _measured(training, base, notice)
    return forecast_of(prepared, admission, table)


def forecast_of(
    prepared: Sequence[PreparedJob], admission: Admission, table: OperatorTable, done: Mapping[str, int] | None = None
) -> Forecast:
    """Of jobs that have been admitted; `done` are the steps of those that go on."""
    done, places, keep_tokens = done or {}, admission.model.places, admission.keep_tokens
    sizes = {size.job.name: size for size in admission.sizes}
    loads = (
        load_of(
            one.job,
            one.data.train,
            size.chunk_tokens,
            places,
            done=done.get(one.job.name, 0),
            keep_tokens=keep_tokens,
            held_bytes=size.state_bytes,
        )
        for one in prepared
        if (size := sizes.get(one.job.name)) is not None
    )
    return Forecast(
        tuple(loads),
        tuple(size.job.name for size in admission.waiting),
        table,
        admission.memory,
        admission.fuse_tokens,
        admission.model.recompute,
        tuple((size.job.name, size.chunk_tokens) for size in admission.sizes if size.warning),
        any(one.data.validation for one in prepared if one.job.name in sizes),
    )


def _unbounded(training: TrainingRun, prepared: Sequence[PreparedJob], base: ModelFolder) -> Admission:
    """All jobs, whatever memory they want. Raises AdapterError for one that finds nothing to train."""
    device = choose_device(training.run.device)
    dtype = choose_dtype(training.run.dtype, device)
    used, _ = memory_here(device)
    found = admit(prepared, footprint(base.path, dtype), dtype=dtype, limit_bytes=_NO_LIMIT, process_bytes=used)
    for _, error in found.refused:
        training.locate(error)
        raise error
    return replace(found, keep_tokens=0)


def _measured(training: TrainingRun, base: ModelFolder, notice: Callable[[str], None]) -> OperatorTable:
    run = training.run
    engine = LocalEngine(
        base,
        device=run.device,
        dtype=run.dtype,
        threads=run.threads,
        num_hidden_layers=training.num_hidden_layers,
        cache_dir=training.cache,
        notice=notice,
    )
    assert engine.planning is not None
    return engine.planning.cost().table
