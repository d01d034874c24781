"""A rank that dies or hangs ends the others, soon and with one clear error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.errors import RankError
from muxtune.parallel.mesh import TensorAxis, join
from muxtune.parallel.tensor import load_sharded
from muxtune.spec.peft import BitFit, Lora
from tests.engine.build import CPU
from tests.engine.prompts import PeftTrial
from tests.parallel.ranks import Raised, RankGroup, sum_for

TIMEOUT_S = 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_other_with_a_clear_error(how: signal.Signals) -> None:
    group = RankGroup(2, timeout_s=TIMEOUT_S)
    try:
        group.ask(sum_for, 0.0)
        group.tell(sum_for, 60.0)
        time.sleep(0.3)
        lost = group.processes[1].pid
        assert lost is not None
        os.kill(lost, how)
        began = time.monotonic()
        found = group.answer(0, within_s=3 * TIMEOUT_S + 10)
        assert time.monotonic() - began < 2 * TIMEOUT_S + 5
        assert isinstance(found, Raised) and found.kind == "RankError"
        assert "rank 0: another of the 2 ranks has died or does not answer" in found.message
        assert "start the run again" in found.message
    finally:
        group.close()


def test_ranks_that_do_not_come_are_not_waited_for_forever(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="another of the 2 ranks"):
        join(0, 2, meeting=f"file://{tmp_path / 'meeting'}", timeout_s=1)
    assert time.monotonic() - began < 30


def test_sums_and_maxima_are_those_of_all_ranks(pair: RankGroup) -> None:
    for rank, (total, top) in enumerate(pair.ask(_exchanged)):
        assert total.tolist() == [1.0, 2.0] and top.tolist() == [1.0, 2.0], rank


def _exchanged(axis: TensorAxis) -> tuple[Tensor, Tensor]:
    own = torch.tensor([float(axis.rank), 1.0])
    return axis.sum_(own.clone()), axis.max_(own + axis.rank * own[1:] * torch.tensor([0.0, 1.0]))


@dataclass(frozen=True, slots=True)
class Breaking(TensorAxis):
    """An axis whose other rank is lost at an exchange of more than a row."""

    def sum_(self, value: Tensor) -> Tensor:
        """Raises RankError."""
        raise RankError("another of the 2 ranks has died", where="rank 0")


def test_no_task_is_blamed_for_a_lost_rank(folder: Callable[[str], Path]) -> None:
    """It leaves the engine as it is, not as a fault of a pass that could be tried again task by task."""
    backbone = load_sharded(folder("llama"), Breaking(0, 2), dtype=torch.float64, device=CPU)
    engine = Engine(backbone)
    for trial in (PeftTrial("one", Lora(r=2), [5, 6]), PeftTrial("two", BitFit(), [4, 3])):
        engine.attach(trial.job, Sequences(trial.examples))
    with pytest.raises(RankError, match="has died"):
        engine.execute(engine.schedule([task.participant() for task in engine.tasks.values()]))
    assert not any(task.has_pending for task in engine.tasks.values())
