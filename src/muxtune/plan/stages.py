"""What each stage of a pipeline is given: layers, and the memory that these and the micro-batches in flight take.

Layers are split once, when the model is loaded; plans change with their members, the split does not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from muxtune.errors import ConfigError
from muxtune.plan.memory import MemoryModel
from muxtune.plan.pipeline import Template


def split_layers(
    layers: int, stages: int, *, layer_s: float = 1.0, entry_s: float = 0.0, exit_s: float = 0.0
) -> tuple[int, ...]:
    """Layers of each stage, contiguous, at least one each: the slowest stage is as fast as it can be.

    Args:
        layer_s, entry_s, exit_s: seconds of one layer, of what the first stage does before its layers, and of what the
            last one does after them.

    Raises ConfigError where there are fewer layers than stages.
    """
    if layers < stages:
        raise ConfigError(f"{stages} stages, but the model has {layers} layers", where="pp", hint=f"at most {layers}")
    counts = [1] * stages
    # Equal layers, each to where the stage then takes least: no exchange could lower the largest.
    loads = [(layer_s + (stage == 0) * entry_s + (stage == stages - 1) * exit_s, stage) for stage in range(stages)]
    heapq.heapify(loads)
    for _ in range(layers - stages):
        load, stage = heapq.heappop(loads)
        counts[stage] += 1
        heapq.heappush(loads, (load + layer_s, stage))
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an hTask holds, all layers: `held_bytes` always (adapters, gradients, moments, carried keys and values),
    `activation_bytes` for each of its micro-batches in flight, the head's apart."""

    held_bytes: int
    activation_bytes: int


NOTHING = Footprint(0, 0)


def stage_peaks(
    template: Template, footprints: Sequence[Footprint], memory: MemoryModel, layers: Sequence[int], *, tp: int = 1
) -> tuple[int, ...]:
    """The most that one device of each stage holds, in bytes; on one device that is `MemoryModel.peak_bytes` if no
    slots are shared.

    A stage has its layers' share of everything; the head is the last one's. Weights are shared out among tp devices,
    activations and adapters are counted as if they were not. What only goes forward counts while it does.
    """
    whole, last = sum(layers), template.stages - 1
    always = _share(memory.base_bytes, 1, tp) + sum(footprint.held_bytes for footprint in footprints)
    return tuple(
        _share(always + _most_in_flight(template, stage, footprints), own, whole)
        + (memory.head_bytes if stage == last else 0)
        for stage, own in enumerate(layers)
    )


def _share(size_bytes: int, part: int, whole: int) -> int:
    """Rounded up."""
    return -(-size_bytes * part // whole)


def _most_in_flight(template: Template, stage: int, footprints: Sequence[Footprint]) -> int:
    """Bytes of activations, all layers: each stage runs its list in order, so that times do not matter."""
    slots = template.of_stage(stage)
    returning = {
        (one.htask, one.chunk, one.iteration) for slot in slots if slot.direction == "backward" for one in slot.actions
    }
    held = most = 0
    for slot in slots:
        sizes = [(footprints[one.htask].activation_bytes, one) for one in slot.actions]
        if slot.direction == "forward":
            held += sum(size for size, _ in sizes)
            most = max(most, held)
            held -= sum(size for size, one in sizes if (one.htask, one.chunk, one.iteration) not in returning)
        elif slot.direction == "backward":
            held -= sum(size for size, _ in sizes)
    return most
