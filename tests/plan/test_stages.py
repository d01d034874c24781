"""Layers and memory of each stage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad
from muxtune.plan.memory import MemoryModel
from muxtune.plan.pipeline import make_template
from muxtune.plan.stages import Footprint, split_layers, stage_peaks
from tests.plan.pipelines import Case, cases

SECONDS = st.floats(0, 5)


def _slowest(counts: tuple[int, ...], layer_s: float, entry_s: float, exit_s: float) -> float:
    loads = [count * layer_s for count in counts]
    loads[0] += entry_s
    loads[-1] += exit_s
    return max(loads)


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0.1, 5), SECONDS, SECONDS)
def test_no_other_split_has_a_faster_slowest_stage(
    layers: int, stages: int, layer_s: float, entry_s: float, exit_s: float
) -> None:
    if layers < stages:
        with pytest.raises(ConfigError, match="at most"):
            split_layers(layers, stages)
        return
    counts = split_layers(layers, stages, layer_s=layer_s, entry_s=entry_s, exit_s=exit_s)
    assert sum(counts) == layers and min(counts) >= 1
    others = (one for one in itertools.product(range(1, layers + 1), repeat=stages) if sum(one) == layers)
    best = min(_slowest(other, layer_s, entry_s, exit_s) for other in others)
    assert _slowest(counts, layer_s, entry_s, exit_s) == pytest.approx(best)


def test_splits_are_even_where_nothing_is_at_the_ends() -> None:
    assert split_layers(8, 4) == (2, 2, 2, 2)
    assert sorted(split_layers(10, 4)) == [2, 2, 3, 3]
    assert split_layers(8, 2, entry_s=0.5, exit_s=3.0) == (5, 3)


MEMORY = MemoryModel(base_bytes=1000, head_bytes=70, row_bytes=2, score_bytes=1)


@given(cases())
def test_micro_batches_in_flight_are_bounded_by_the_depth(case: Case) -> None:
    """The first stage holds S slots at most, the last one."""
    sizes = [Footprint(0, 100 * (htask + 1)) for htask in range(len(case.trains))]
    layers = (1,) * case.stages
    peaks = stage_peaks(case.template, sizes, MemoryModel(), layers)
    widest = max(sum(sizes[htask].activation_bytes for htask in bucket) for bucket in case.buckets)
    largest = max(size.activation_bytes for size in sizes)
    slot = widest if case.together else largest
    for stage, peak in enumerate(peaks):
        assert largest <= peak * case.stages + case.stages
        assert peak <= -(-(case.stages - stage) * slot // case.stages)


def test_one_device_holds_what_the_memory_model_says() -> None:
    loads = [
        TaskLoad(str(number), (ChunkLoad((Span(rows, rows),), rows),), state_bytes=10 * number, carried=3)
        for number, rows in enumerate((5, 9, 4))
    ]
    memory = MemoryModel(1000, 70, 2, 1, 6)
    htasks = [loads[:2], loads[2:]]
    sizes = [
        Footprint(
            memory.held_bytes(htask) - memory.base_bytes,
            memory.pass_bytes(sum(one.peak_rows for one in htask), max(one.longest for one in htask)) - 70,
        )
        for htask in htasks
    ]
    template = make_template([[True], [True]], [[0], [1]], 1)
    assert stage_peaks(template, sizes, memory, (3,)) == (memory.peak_bytes(loads, htasks),)


def test_weights_are_shared_out_by_layers_and_by_devices() -> None:
    template = make_template([[True] * 4], [[0]], 2)
    assert stage_peaks(template, [Footprint(100, 40)], MEMORY, (3, 1)) == (
        (1000 + 100 + 2 * 40) * 3 // 4,
        (1000 + 100 + 40) // 4 + 70,
    )
    assert stage_peaks(template, [Footprint(100, 40)], MEMORY, (2, 2), tp=2)[0] == (500 + 100 + 80) // 2


def test_what_only_goes_forward_is_not_held() -> None:
    template = make_template([[False, False, True]], [[0]], 2)
    assert stage_peaks(template, [Footprint(0, 40)], MemoryModel(), (1, 1)) == (20, 20)


def test_members_of_a_bucket_that_run_together_are_held_together() -> None:
    sizes = [Footprint(0, 40), Footprint(0, 60)]
    apart, together = (make_template([[True], [True]], [[0, 1]], 1, together=together) for together in (False, True))
    assert stage_peaks(apart, sizes, MemoryModel(), (1,)) == (60,)
    assert stage_peaks(together, sizes, MemoryModel(), (1,)) == (100,)
