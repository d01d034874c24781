"""Measures the operator table of a loaded backbone, in place: some seconds of passes over a few layers.

    layers       two layers forward and backward over packed rows, in many short sequences or few long ones; what one
                 sequence adds is the difference between the two, and the rest is the layer
    adapters     the same layers with one task's adapter, less the layers alone; of each PEFT type, in two sizes
    seen         the same layers with a learned prefix, less the layer
    head         the head and the loss on gathered rows, without and with their gradient
    entry        a pass of the executor through no layer at all, with nothing to predict
    depth        all layers with a LoRA, over as many times what a few take: what they keep leaves the caches. Whatever
                 is of a layer is multiplied with it
    degrees      layer[d] = layer[1] - linears at their shapes + linears at the shapes of one of d ranks

The trials of a part run in turn (`muxtune.engine.interleaved`). Counts of rows that would take much of the budget by
themselves are left out: curves go on with their last slope. PiSSA, whose start takes a decomposition of each weight, is
LoRA's cost times the ratio of their products. Virtual rows and prefixes are rows and positions, and nothing beside.

Not measured: what several tasks' LoRA pairs gain as one product, adapters on the embedding and the head, the copies of
keys and values of cut sequences. A larger adapter of a type takes no less than a smaller one, a larger count no less
than a smaller: what says otherwise was noise. How far repeats were apart is the table's `spread`. The backbone is not
changed and nothing is attached to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from muxtune.engine.bystanders import others_since, used
from muxtune.engine.chain import DEPTH, ChainTrial, FirstLayers
from muxtune.engine.interleaved import Clock, Parts, Stopwatch, Trial, settled
from muxtune.engine.pieces import EntryTrial, HeadTrial, OptimizerTrial, RefreshTrial, ShardedTrial, shardable
from muxtune.errors import MuxTuneError
from muxtune.models.backbone import Backbone
from muxtune.models.denormals import flushing
from muxtune.models.memory import Footprint
from muxtune.peft.base import Adapter
from muxtune.peft.registry import build_adapter
from muxtune.plan.loads import DROPPING, label_of
from muxtune.plan.profile import NOTHING, AdapterCost, Curve, Directions, OperatorTable, by_size
from muxtune.spec.peft import Lora, PeftBase, PrefixTuning, PromptTuning, read_peft

BUDGET_S = 10.0
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
SHORT = 64  # rows of a sequence where the layer is measured
SHORTEST, MANY = 4, 256  # rows of a sequence, and of a pass, where short sequences are told from the layer
ADAPTED_ROWS = (16, 128, 512)  # the last is the rows of a chunk, which are the most that a task brings
WHOLE_ROWS = (128, 512)  # of passes through all layers
TRAINED = (16, 64, 128, 384)
ENTERED = (16, 128, 512, 2048)
SHARDED_ROWS = (16, 128, 512, 2048)
PARAMETERS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
DEGREES = (2, 4)
SEEN = ((16, 16, 8), (64, 64, 4), (256, 256, 1), (512, 512, 1), (512, 1536, 1))  # rows, positions before, sequences
ADAPTERS: Sequence[Mapping[str, object]] = (
    *({"type": "lora", "r": r} for r in (4, 64)),
    *({"type": "lora", "r": r, "lora_dropout": 0.1} for r in (4, 64)),
    *({"type": "dora", "r": r} for r in (4, 64)),
    {"type": "dora", "r": 8, "lora_dropout": 0.1},
    {"type": "ia3"},
    {"type": "bitfit"},
    {"type": "ln_tuning"},
    *({"type": "shira", "r": r} for r in (4, 32)),
    *({"type": kind, "bottleneck_size": size} for kind in ("houlsby", "pfeiffer", "parallel") for size in (16, 128)),
)
_LAYERS, _ADAPTERS, _OTHERS = 0.45, 0.35, 0.04  # shares of the budget
_ALONE_EVERY = 3
_ALLOCATOR = 1.1  # of what is asked for, what the process grows by
_FULL_WEIGHTS = 2_000_000  # of a layer, from which on it is worth the whole budget

Known = dict[str, tuple[AdapterCost, ...]]


def measure(
    backbone: Backbone, *, budget_s: float | None = None, clock: Clock = time.perf_counter, model: str = ""
) -> OperatorTable:
    """The table of this backbone, here and now. `model` is what the table calls it.

    Takes about `budget_s` - by default `BUDGET_S`, and less for a model whose layers are small - or longer where two
    runs of everything do.
    """
    with flushing(backbone.flushes):
        return _measured(backbone, budget_s, clock, model)


def _measured(backbone: Backbone, budget_s: float | None, clock: Clock, model: str) -> OperatorTable:
    before = used()
    watch = Stopwatch(clock, backbone.device, _budget_s(backbone) if budget_s is None else budget_s)
    layer, attention = _layers(backbone, watch)
    head = _head(backbone, watch)
    attention_seen = _seen(backbone, watch, layer, attention)
    deep = _deep(backbone, watch)
    degrees = {1: layer, **_degrees(backbone, watch, layer)}
    table = OperatorTable(
        model=model or str(backbone.config.model_type),
        device=device_name(backbone.device),
        dtype=dtype_name(backbone.dtype),
        threads=torch.get_num_threads(),
        layers=len(backbone.blocks),
        row_bytes=int(backbone.config.hidden_size) * backbone.dtype.itemsize,
        entry=_entry(backbone, watch),
        layer={degree: one.scaled(*deep) for degree, one in degrees.items()},
        attention=attention.scaled(*deep),
        head=head,
        adapters={
            label: tuple(replace(one, cost=one.cost.scaled(*deep)) for one in own)
            for label, own in _adapters(backbone, watch).items()
        },
        optimizer=_optimizer(backbone, watch),
        seen=attention_seen.scaled(*deep) if attention_seen is not None else None,
    )
    return replace(table, spread=watch.spread, others=others_since(before))


def _budget_s(backbone: Backbone) -> float:
    weights = sum(op.in_features * op.out_features for op in backbone.attach_points.values() if op.layer == 0)
    return BUDGET_S * min(1.0, weights / _FULL_WEIGHTS)


def measuring_bytes(model: Footprint) -> int:
    """What measuring holds at most beside the process and the weights: activations of the widest pass over `DEPTH`
    layers, or of that through all, and the adapters of all types on these layers with their gradients."""
    depth = min(DEPTH, model.blocks)
    rows = ROWS[-1] * (model.row_bytes + model.score_bytes * ROWS[-1]) * depth // model.blocks
    rows = max(rows, WHOLE_ROWS[-1] * (model.row_bytes + model.score_bytes * SHORT))
    parameters = sum(_parameters(spec, model) for spec in _specs()) * depth // model.blocks
    return int(_ALLOCATOR * (max(rows, model.head_bytes) + 2 * 4 * parameters))


def _parameters(spec: PeftBase, model: Footprint) -> int:
    """0 where the family has no place for the type, or too few numbers for the size."""
    try:
        return spec.parameters(model.places)
    except MuxTuneError:
        return 0


def device_name(device: torch.device) -> str:
    """What a device is called, for people and in the name of a kept table."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(backbone: Backbone, watch: Stopwatch) -> tuple[Directions, Directions]:
    """The layer by rows, and attention of one sequence in it by its positions."""
    most = _most(backbone)
    short = max(rows for rows in ROWS if rows <= min(SHORT, most))
    long = {(max(own, MANY), own) for own in ROWS if short < own <= most}
    cells = {(rows, min(rows, short)) for rows in ROWS} | long | {(MANY, SHORTEST)}
    trials: dict[tuple[int, int], Trial] = {
        (rows, own): ChainTrial(backbone, [own] * (rows // own), watch) for rows, own in sorted(cells)
    }
    found = watch.timed(trials, share=_LAYERS, growing=True)
    cell = {rows: (rows, min(rows, short)) for rows in ROWS if (rows, min(rows, short)) in found}
    again = settled({rows: found[own] for rows, own in cell.items()}, {rows: trials[own] for rows, own in cell.items()})
    found |= {cell[rows]: parts for rows, parts in again.items()}
    forward, backward = (_parted({cell: run[part] for cell, run in found.items()}, short) for part in (0, 1))
    return Directions(forward[0], backward[0]), Directions(forward[1], backward[1])


def _parted(seconds: Mapping[tuple[int, int], float], short: int) -> tuple[Curve, Curve]:
    """Seconds of cells (rows, rows of each sequence) as base(rows) + sequences x attention(positions).

    What is linear in positions can be in either; it is in the base, so that attention is flat up to `short`.
    """
    call = 0.0
    if (MANY, SHORTEST) in seconds and (MANY, short) in seconds:
        more = seconds[MANY, SHORTEST] - seconds[MANY, short]
        call = max(0.0, more / (MANY // SHORTEST - MANY // short))
    base = {rows: taken - rows // own * call for (rows, own), taken in seconds.items() if own == min(rows, short)}
    layer = _rising(base, base.values())
    long = {own: (taken - base[rows]) * own / rows for (rows, own), taken in seconds.items() if own > short}
    return layer, _rising([short, *long], [call, *(max(call, one) for one in long.values())])


def _seen(backbone: Backbone, watch: Stopwatch, layer: Directions, attention: Directions) -> Directions | None:
    """Of rows that see more than themselves; None where the model's keys and values are not known."""
    trials: dict[tuple[int, int, int], Trial] = {}
    for rows, before, count in SEEN:
        adapter = _built(backbone, PrefixTuning(num_virtual_tokens=before))
        if adapter is not None and rows + before <= _most(backbone):
            trials[rows, before, count] = ChainTrial(backbone, [rows] * count, watch, adapter)
    if not trials:
        return None
    found = watch.timed(trials, share=_OTHERS, growing=True)

    def curve(part: int, base: Curve, alone: Curve) -> Curve:
        own = {
            rows * (rows + before): max((run[part] - float(base(rows * count))) / count, float(alone(rows)))
            for (rows, before, count), run in found.items()
        }
        return _rising(own, own.values())

    return Directions(curve(0, layer.forward, attention.forward), curve(1, layer.backward, attention.backward))


def _deep(backbone: Backbone, watch: Stopwatch) -> tuple[float, float]:
    """What a layer takes in a pass through all of them, over what it takes among a few: forward, backward."""
    depth, layers = _depth(backbone), len(backbone.blocks)
    if layers == depth:
        return 1.0, 1.0
    trials: dict[tuple[int, int], Trial] = {}
    for rows in sorted({min(rows, _most(backbone)) for rows in WHOLE_ROWS}):
        own = [min(rows, SHORT)] * max(1, rows // SHORT)
        for over in (depth, layers):
            adapter = _built(backbone, Lora(), over)
            trials[rows, over] = ChainTrial(backbone, own, watch, adapter, depth=over)
    found = watch.timed(trials, share=_OTHERS)
    ratios = [np.divide(run, found[rows, depth]) for (rows, over), run in found.items() if over == layers]
    forward, backward = np.maximum(np.mean(ratios, axis=0), 1.0).tolist()
    return forward, backward


def _head(backbone: Backbone, watch: Stopwatch) -> Directions:
    """By trained rows; "backward" is what the gradient adds."""
    trials = {rows: HeadTrial(backbone, rows, watch) for rows in TRAINED}
    found = watch.timed(trials, share=_OTHERS, growing=True)
    forward = _rising(found, [run[0] for run in found.values()])
    return Directions(forward, _rising(found, [run[1] - run[0] for run in found.values()]))


def _entry(backbone: Backbone, watch: Stopwatch) -> Curve:
    """What a pass takes that is neither layer nor head, by rows."""
    own = min(SHORT, _most(backbone))
    trials = {rows: EntryTrial(backbone, [min(own, rows)] * max(1, rows // own), watch) for rows in ENTERED}
    found = watch.timed(trials, share=_OTHERS)
    return _rising(found, [run[0] for run in found.values()])


def _adapters(backbone: Backbone, watch: Stopwatch) -> Known:
    """Of every PEFT type that this family has a place for."""
    built = [(spec, adapter) for spec in _specs() if (adapter := _built(backbone, spec)) is not None]
    rows_of = [rows for rows in ADAPTED_ROWS if rows <= _most(backbone)]
    if watch.hurried:
        rows_of = [rows_of[0], rows_of[-1]]
    added = {rows: _added(backbone, watch, rows, [adapter for _, adapter in built]) for rows in rows_of}
    refreshed = watch.timed({place: RefreshTrial(one, watch) for place, (_, one) in enumerate(built)}, share=0.0)
    layers, depth = len(backbone.blocks), _depth(backbone)
    known: dict[str, list[AdapterCost]] = {}
    for place, (spec, adapter) in enumerate(built):
        parts = [[layers * added[rows][place][part] for rows in rows_of] for part in (0, 1)]
        cost = Directions(*(_rising(rows_of, one) for one in parts))
        points, step_s = len(adapter.modules) * layers // depth, refreshed[place][0] * layers / depth
        own = AdapterCost(spec.parameters(backbone.places), cost, points, step_s)
        known.setdefault(label_of(spec), []).append(own)
    return _with_kin({label: by_size(own) for label, own in known.items()}, backbone)


def _added(backbone: Backbone, watch: Stopwatch, rows: int, adapters: Sequence[Adapter]) -> list[Parts]:
    """Seconds of a layer that each adapter adds to `rows`. The layer alone is one of every few trials: what runs before
    a trial leaves its mark on it."""
    trials: dict[tuple[int, bool], Trial] = {}
    for place, adapter in enumerate(adapters):
        if place % _ALONE_EVERY == 0:
            trials[place, False] = ChainTrial(backbone, [rows], watch, rotating=False)
        trials[place, True] = ChainTrial(backbone, [rows], watch, adapter)
    found = watch.timed(trials, share=_ADAPTERS / len(ADAPTED_ROWS))
    alone = np.median([run for (_, adapted), run in found.items() if not adapted], axis=0)
    return [tuple(np.subtract(found[place, True], alone).tolist()) for place in range(len(adapters))]


def _with_kin(known: Known, backbone: Backbone) -> Known:
    """With the types that are told from others, and those that are nothing beside their rows and positions."""
    nothing = (AdapterCost(0, Directions(NOTHING, NOTHING)),)
    found = {**known, label_of(PrefixTuning()): nothing, label_of(PromptTuning()): nothing}
    pissa, lora = Lora(init_lora_weights="pissa"), Lora()
    ratio = pissa.flops_per_token(backbone.places) / max(1, lora.flops_per_token(backbone.places))
    for tail in ("", DROPPING):
        own = known.get(label_of(lora) + tail, ())
        found[label_of(Lora(use_rslora=True)) + tail] = own
        found[label_of(pissa) + tail] = tuple(replace(one, cost=one.cost.scaled(ratio)) for one in own)
    return {label: own for label, own in found.items() if own}


def _optimizer(backbone: Backbone, watch: Stopwatch) -> Curve:
    """One step, by parameters."""
    found = watch.timed({size: OptimizerTrial(backbone, size, watch) for size in PARAMETERS}, share=_OTHERS)
    return _rising(found, [run[0] for run in found.values()])


def _degrees(backbone: Backbone, watch: Stopwatch, layer: Directions) -> dict[int, Directions]:
    """The layer on one of several ranks; of a family whose linears' roles are not known, none."""
    own = [op for op in backbone.attach_points.values() if op.layer == 0]
    degrees = [degree for degree in DEGREES if shardable(own, degree)]
    trials: dict[tuple[int, int], Trial] = {
        (rows, degree): ShardedTrial(own, degree, rows, watch) for rows in SHARDED_ROWS for degree in (1, *degrees)
    }
    found = watch.timed(trials, share=_OTHERS) if degrees else {}

    def linears(degree: int, part: int) -> Curve:
        runs = {rows: run[part] for (rows, ranks), run in found.items() if ranks == degree}
        return _rising(runs, runs.values())

    def shard(whole: Curve, degree: int, part: int) -> Curve:
        saved = linears(1, part)(whole.counts) - linears(degree, part)(whole.counts)
        return _rising(whole.counts, whole(whole.counts) - np.maximum(saved, 0.0))

    return {one: Directions(shard(layer.forward, one, 0), shard(layer.backward, one, 1)) for one in degrees}


def _specs() -> list[PeftBase]:
    return [spec for one in ADAPTERS if isinstance(spec := read_peft(one), PeftBase)]


def _built(backbone: Backbone, spec: PeftBase, depth: int | None = None) -> Adapter | None:
    """On the first layers alone; None where the family has no place for the type, or too few numbers for the size."""
    view = FirstLayers(backbone, _depth(backbone) if depth is None else depth)
    try:
        return build_adapter(spec, view, seed=0, dtype=backbone.dtype, device=backbone.device)
    except MuxTuneError:
        return None


def _depth(backbone: Backbone) -> int:
    return min(DEPTH, len(backbone.blocks))


def _most(backbone: Backbone) -> int:
    """Rows of the longest sequence that the model takes, as far as it is measured."""
    return min(backbone.max_positions or ROWS[-1], ROWS[-1])


def _rising(counts: Iterable[float], seconds: Iterable[float]) -> Curve:
    """More of anything takes no less; what is less was noise."""
    measured = np.maximum.accumulate(np.maximum(np.fromiter(seconds, np.float64), 0.0))
    return Curve(tuple(map(float, counts)), tuple(map(float, measured)))
