"""The layout of a micro-batch, against a slow reading of what it should say."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.types import TokenSequence
from muxtune.engine.cut import CutSequences
from muxtune.engine.packing import pack
from muxtune.peft.base import Adapter
from muxtune.peft.parameters import FlatParameters
from muxtune.plan.types import LossSpec, MicroBatch, SequenceRef, WorkItem

CPU = torch.device("cpu")


@st.composite
def _sources(draw: st.DrawFn) -> list[list[TokenSequence]]:
    """One to four tasks' sequences, with masks of any kind (but for the first token, which nothing predicts)."""
    tasks = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        made = []
        for length in lengths:
            mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))])
            ids = np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), np.int32)
            made.append(TokenSequence(draw(st.integers(0, 10**9)), ids, mask))
        tasks.append(made)
    return tasks


# Packing asks an adapter for the rows it puts before its sequences; these have none.
ADAPTERS = defaultdict(lambda: Adapter({}, FlatParameters({}, torch.float32, CPU)))


def _batch(tasks: list[list[TokenSequence]], kind: str = "train") -> MicroBatch:
    return MicroBatch(
        0,
        0,
        tuple(
            WorkItem(
                f"task-{number}",
                kind,
                f"source-{number}",
                tuple(SequenceRef(place, len(sequence)) for place, sequence in enumerate(task)),
                LossSpec(number + 3) if kind == "train" else None,
            )
            for number, task in enumerate(tasks)
        ),
    )


@given(_sources())
def test_rows_positions_targets_and_weights_are_those_of_the_sequences(tasks: list[list[TokenSequence]]) -> None:
    sources = {f"source-{number}": task for number, task in enumerate(tasks)}
    packed = pack(_batch(tasks), sources, ADAPTERS, CutSequences(), CPU, torch.float64)
    row, trained = 0, []
    for number, task in enumerate(tasks):
        laid = packed.items[number]
        assert laid.start == row and laid.first == len(trained)
        names = list(zip(laid.example_t.tolist(), laid.position_t.tolist(), strict=True))
        assert names == [(sequence.index, position) for sequence in task for position in range(len(sequence))]
        for sequence in task:
            rows = slice(row, row + len(sequence))
            assert packed.rows.ids_T[rows].tolist() == sequence.ids.tolist()
            assert packed.rows.positions_T[rows].tolist() == list(range(len(sequence)))
            trained += [
                (row + place - 1, int(sequence.ids[place]), 1 / (number + 3))
                for place in range(len(sequence))
                if sequence.mask[place]
            ]
            row += len(sequence)
        assert (laid.stop, laid.last) == (row, len(trained))
    assert packed.weight_N is not None
    found = zip(packed.predict_N.tolist(), packed.target_N.tolist(), packed.weight_N.tolist(), strict=True)
    assert list(found) == trained
    assert len(packed.rows.ids_T) == row + -row % 16 == len(packed.rows.positions_T)
    lengths = [len(sequence) for task in tasks for sequence in task]
    assert [segment.rows for segment in packed.rows.segments] == lengths + ([-row % 16] if row % 16 else [])


def test_a_forward_batch_has_no_weights() -> None:
    tasks = [[TokenSequence(0, np.arange(5, dtype=np.int32), np.array([False, True, False, True, True]))]]
    packed = pack(_batch(tasks, "eval"), {"source-0": tasks[0]}, ADAPTERS, CutSequences(), CPU, torch.float32)
    assert packed.weight_N is None and packed.predict_N.tolist() == [0, 2, 3] and packed.target_N.tolist() == [1, 3, 4]
