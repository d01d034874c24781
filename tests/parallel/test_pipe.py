"""Who stands where among tp x pp ranks, and messages between neighbours: early, late, both ways at once, and never."""

from __future__ import annotations

import time

import pytest
import torch

from muxtune.errors import ConfigError, RankError
from muxtune.parallel.mesh import ALONE, TensorAxis
from muxtune.parallel.pipe import Mesh, make_mesh
from tests.parallel.ranks import RankGroup

_TIMEOUT_S = 30
CPU = torch.device("cpu")


def test_a_mesh_has_as_many_ranks_as_there_are() -> None:
    with pytest.raises(ConfigError, match="1 ranks are not tp 2 x pp 2") as refused:
        make_mesh(ALONE, tp=2, pp=2, timeout_s=_TIMEOUT_S)
    assert "start 4" in str(refused.value)
    assert make_mesh(ALONE, tp=1, pp=1, timeout_s=_TIMEOUT_S) == Mesh(ALONE)


def test_messages_arrive_in_order_whenever_they_are_waited_for(pair: RankGroup) -> None:
    first, second = pair.ask(_exchanged)
    assert first == [[10.0] * 3, [11.0] * 4]
    assert second == [[0.0] * 5, [1.0] * 5, [2.0] * 5]


def _exchanged(axis: TensorAxis) -> list[list[float]]:
    """Rank 0 sends three, late; rank 1 has posted its receives long before, and sends two the other way meanwhile."""
    pipe = make_mesh(axis, tp=1, pp=2, timeout_s=_TIMEOUT_S).pipe
    sent, posted = [], []
    if pipe.first:
        assert pipe.rows_in is None and pipe.back_out is None and pipe.rows_out is not None and pipe.back_in is not None
        posted = [pipe.back_in.receive((size,), torch.float64, CPU) for size in (3, 4)]
        time.sleep(0.2)
        sent = [pipe.rows_out.send(torch.full((5,), float(number))) for number in range(3)]
    else:
        assert pipe.rows_out is None and pipe.back_in is None and pipe.rows_in is not None and pipe.back_out is not None
        posted = [pipe.rows_in.receive((5,), torch.float32, CPU) for _ in range(3)]
        sent = [
            pipe.back_out.send(torch.full((size,), value, dtype=torch.float64)) for size, value in ((3, 10), (4, 11))
        ]
    for message in [*posted, *sent]:
        message.wait()
        message.wait()
        assert message.done()
    return [message.value.tolist() for message in posted]


def test_a_neighbour_that_never_sends_is_an_error_in_time(pair: RankGroup) -> None:
    first, second = pair.ask(_awaited_in_vain)
    assert first is None
    kind, told, waited_s = second
    assert kind == "RankError" and "rank 1" in told and "does not answer" in told
    assert 1 < waited_s < 10


def _awaited_in_vain(axis: TensorAxis) -> tuple[str, str, float] | None:
    pipe = make_mesh(axis, tp=1, pp=2, timeout_s=1.5).pipe
    if pipe.rows_in is None:
        time.sleep(3)
        return None
    began = time.monotonic()
    try:
        pipe.rows_in.receive((4,), torch.float32, CPU).wait()
    except RankError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("nothing was sent")
