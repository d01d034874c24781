"""How what rank 0 tells the others is written: JSON and flat tensors, and read again on the other side.

Token ids travel once, when a task is attached or a source is lent; a schedule names them by number. A schedule that
decodes brings the new tokens of each sequence, and one that compares (dpo) the reference values that it needs: only
rank 0 looks these up.

The boundary: values in, values out; who tells whom is for `ranks` and `follow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.followers import Source
from muxtune.engine.references import References
from muxtune.parallel.channel import Message
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem

Value = list[object]  # [source, index, reference value]


def tensors_of(sequences: Sequence[TokenSequence], name: str) -> dict[str, Tensor]:
    """Ids and masks end to end, lengths and numbers of the examples, under names that begin with `name`."""
    lengths = torch.tensor([len(one) for one in sequences], dtype=torch.int64)
    numbers = torch.tensor([one.index for one in sequences], dtype=torch.int64)
    ids = np.concatenate([one.ids for one in sequences]) if sequences else np.zeros(0, np.int32)
    mask = np.concatenate([one.mask for one in sequences]) if sequences else np.zeros(0, np.bool_)
    return {
        f"{name}/ids": torch.from_numpy(ids.astype(np.int32)),
        f"{name}/mask": torch.from_numpy(mask.astype(np.bool_)),
        f"{name}/lengths": lengths,
        f"{name}/numbers": numbers,
    }


def sequences_from(tensors: Mapping[str, Tensor], name: str) -> list[TokenSequence]:
    """What `tensors_of` wrote."""
    lengths, numbers = tensors[f"{name}/lengths"].tolist(), tensors[f"{name}/numbers"].tolist()
    ends = np.cumsum(lengths, dtype=np.int64)[:-1]
    ids = np.split(tensors[f"{name}/ids"].numpy(), ends) if lengths else []
    masks = np.split(tensors[f"{name}/mask"].numpy(), ends) if lengths else []
    return [TokenSequence(number, *parts) for number, *parts in zip(numbers, ids, masks, strict=True)]


def reference_values(schedule: RoundSchedule, known: References) -> list[Value]:
    """What the dpo items of a schedule are compared with, of both sequences of each pair."""
    asked = {
        (item.source, index)
        for item in _items(schedule)
        if item.loss is not None and item.loss.kind == "dpo"
        for ref in item.sequences
        for index in (ref.index & ~1, ref.index | 1)
    }
    found = ((source, index, known.value(source, index)) for source, index in sorted(asked))
    return [[source, index, value] for source, index, value in found if value is not None]


class ToldReferences(References):
    """The values that came with a schedule; nothing is kept on disk."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[tuple[str, int], float] = {}

    def take(self, values: Iterable[Value]) -> None:
        """Those of the schedule that runs next, instead of the ones before."""
        self._told = {(str(source), int(str(index))): float(str(value)) for source, index, value in values}

    def value(self, source: str, index: int) -> float | None:
        """See `References.value`."""
        return self._told.get((source, index))


def new_tokens(schedule: RoundSchedule, sources: Mapping[str, Source]) -> Message:
    """By source: which sequences it decodes at all, and of each that the schedule names the tokens that it brings."""
    found: Message = {}
    for item in _items(schedule):
        source = sources.get(item.source)
        if not isinstance(source, DecodeSource):
            continue
        told = found.setdefault(item.source, {"live": sorted(source.states), "new": []})
        for ref in item.sequences:
            state = source.states.get(ref.index)
            if state is not None:
                told["new"].append([ref.index, state.cached, state.ids[state.cached :]])
    return found


def take_tokens(told: Message, sources: Mapping[str, Source]) -> None:
    """Bring the decode sources of a follower to where rank 0's are."""
    for name, what in told.items():
        source = sources[name]
        assert isinstance(source, DecodeSource)
        for slot in set(source.states) - set(what["live"]):
            source.finish(slot)
        for slot, cached, ids in what["new"]:
            state = source.states.setdefault(slot, DecodeState([]))
            state.ids[cached:] = ids


def _items(schedule: RoundSchedule) -> list[WorkItem]:
    return [item for action in schedule.actions if isinstance(action, MicroBatch) for item in action.items]
