"""Whole runs driven by rank 0 and followed by the others, in ranks that are there already."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from muxtune.engine.follow import Follower
from muxtune.engine.ranks import Ranks
from muxtune.engine.training import TrainingRun
from muxtune.errors import MuxTuneError
from muxtune.parallel.channel import open_channel
from muxtune.parallel.layout import RankLayout
from muxtune.parallel.mesh import TensorAxis
from muxtune.spec.event import RunEvent, TaskEvent
from muxtune.spec.run import RunSpec
from tests.engine.build import CPU
from tests.engine.runs import stop_after

Harm = Callable[[TensorAxis, pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Driven:
    """What a rank's part came to. `events`: of tasks, as rank 0 told them; `lost`: whether ranks are lost with it."""

    error: str = ""
    lost: bool = False
    events: tuple[tuple[str, str, str], ...] = ()


def drive(
    axis: TensorAxis, run: RunSpec, cache: Path, options: dict[str, bool], rounds: int | None, harm: Harm | None = None
) -> Driven:
    """The run on this rank: as the first or as a follower. It stops after so many `rounds`; `harm` is done before."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    torch.manual_seed(axis.rank)  # nothing may depend on it
    with pytest.MonkeyPatch.context() as patch:
        if harm is not None:
            harm(axis, patch)
        return _drive(axis, run, cache, options, rounds)


def _drive(axis: TensorAxis, run: RunSpec, cache: Path, options: dict[str, bool], rounds: int | None) -> Driven:
    channel = open_channel(axis, range(axis.size), timeout_s=60)
    events: list[RunEvent] = []
    try:
        if axis.rank:
            Follower(channel, axis, device=CPU, cache_dir=cache).run()
            return Driven()
        layout = RankLayout(axis.size // run.pp, run.pp)
        ranks = Ranks(channel, axis, layout, device=CPU, here=axis.size, timeout_s=20)
        run = run.model_copy(update={"tp": layout.tp, "pp": layout.pp})
        stop = stop_after(rounds) if rounds is not None else lambda: False
        with ranks.leading():
            training = TrainingRun(run, cache_dir=cache, ranks=ranks, stop=stop, **options)
            events.extend(training.events())
        return Driven(events=_told(events))
    except MuxTuneError as error:
        return Driven(f"{type(error).__name__}: {error}", True, _told(events))


def _told(events: list[RunEvent]) -> tuple[tuple[str, str, str], ...]:
    return tuple((one.task, one.kind, one.message) for one in events if isinstance(one, TaskEvent))
