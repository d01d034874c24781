"""The profiler: what it measures is there and grows; it stays within its budget and leaves nothing behind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count, pairwise
from time import perf_counter

import pytest
import torch

from muxtune.engine import interleaved, profiler
from muxtune.engine.chain import DEPTH
from muxtune.engine.interleaved import Stopwatch, settled, spread_of, typical
from muxtune.engine.pieces import ShardedTrial, shardable
from muxtune.engine.profiler import ADAPTERS, SHORTEST, _parted, measure
from muxtune.models.backbone import Backbone
from muxtune.plan.cost import CostModel
from muxtune.plan.loads import ChunkLoad, Span, TaskLoad, label_of
from muxtune.plan.profile import OperatorTable, from_json
from muxtune.spec.peft import read_peft
from tests.engine.build import CPU, backbone_of


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of("llama", layers=3)


@pytest.fixture(scope="module")
def measured(backbone: Backbone) -> Iterator[tuple[OperatorTable, str, str]]:
    """The table, and the backbone's state before and after."""
    before = _state(backbone)
    table = measure(backbone)
    yield table, before, _state(backbone)


def test_the_backbone_is_what_it_was(measured: tuple[OperatorTable, str, str]) -> None:
    _, before, after = measured
    assert before == after


def test_every_curve_is_positive_and_grows_and_all_of_it_goes_through_a_file(
    measured: tuple[OperatorTable, str, str],
) -> None:
    table = measured[0]
    pairs = [*table.layer.values(), table.attention, table.head, table.seen]
    pairs += [one.cost for own in table.adapters.values() for one in own]
    curves = [table.entry, table.optimizer, *(part for pair in pairs if pair for part in (pair.forward, pair.backward))]
    for curve in curves:
        assert all(one < other for one, other in pairwise(curve.counts))
        assert all(0 <= one <= other for one, other in pairwise(curve.seconds))
    for curve in (table.entry, table.optimizer, table.layer[1].forward, table.layer[1].backward, table.head.forward):
        assert curve.seconds[0] > 0
    assert table.layer[1].forward.seconds[-1] > table.layer[1].forward.seconds[0]
    assert (table.layers, table.threads, table.dtype) == (3, torch.get_num_threads(), "float32")
    assert table.row_bytes == 48 * 4
    assert from_json(table.to_json()) == table


def test_every_type_is_in_it_and_a_pass_of_each_is_more_than_the_layers(
    measured: tuple[OperatorTable, str, str], backbone: Backbone
) -> None:
    table = measured[0]
    labels = {label_of(read_peft(one)) for one in ADAPTERS}  # type: ignore[arg-type]
    assert labels | {"rslora", "pissa", "prefix_tuning", "prompt_tuning", "pissa+dropout"} <= table.adapters.keys()
    lora = table.adapters["lora"]
    spec = read_peft({"type": "lora", "r": 4})
    assert lora[0].parameters == spec.parameters(backbone.places)  # type: ignore[attr-defined]
    assert lora[0].points == len(backbone.attach_points)
    chunk = ChunkLoad((Span(64, 64),), 16)
    cost = CostModel(table)
    assert cost.own_s(TaskLoad("t", (chunk,), "lora", lora[0].parameters), chunk) > 0
    assert cost.pass_cost([(TaskLoad("t", (chunk,)), chunk)]).total_s(3) > 0


def test_a_rank_of_several_has_less_to_do(measured: tuple[OperatorTable, str, str], backbone: Backbone) -> None:
    table = measured[0]
    assert table.layer.keys() == {1, 2, 4}
    for degree in (2, 4):
        for one, other in zip(table.layer[1].forward.seconds, table.layer[degree].forward.seconds, strict=True):
            assert other <= one


@pytest.mark.parametrize("arch", ["gemma2", "gpt2", "opt-350m", "qwen3"])
def test_families_with_attention_and_embeddings_of_their_own_are_measured(arch: str) -> None:
    table = measure(backbone_of(arch))
    assert table.layer[1].forward.counts[-1] == 2048 and "lora" in table.adapters


def test_a_layer_and_its_sequences_are_told_apart() -> None:
    base, call, square = (lambda rows: 1.0 + rows / 100), 0.05, 1e-5
    cells = [(16, 16), (64, 64), (256, SHORTEST), (256, 64), (256, 128), (256, 256), (512, 64), (512, 512)]
    seconds = {(rows, own): base(rows) + rows // own * (call + square * max(0, own**2 - 64**2)) for rows, own in cells}
    layer, attention = _parted(seconds, 64)
    assert layer.counts == (16, 64, 256, 512) and attention.counts == (64, 128, 256, 512)
    assert layer.seconds == pytest.approx([base(rows) for rows in (16, 64, 256, 512)])
    assert attention.seconds == pytest.approx([call + square * (own**2 - 64**2) for own in (64, 128, 256, 512)])
    assert float(attention(4)) == pytest.approx(call)


def test_what_all_layers_take_over_a_few_multiplies_what_is_of_a_layer(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only counts how often it is read, so that two tables are the same."""

    def table(forward: float, backward: float) -> OperatorTable:
        monkeypatch.setattr(profiler, "_deep", lambda *_: (forward, backward))
        readings = count()
        return measure(backbone, budget_s=0.5, clock=lambda: float(next(readings)))

    alone, deep = table(1, 1), table(2, 4)
    assert deep.layer == {degree: one.scaled(2, 4) for degree, one in alone.layer.items()}
    assert alone.attention.scaled(2, 4) == deep.attention and alone.seen is not None
    assert alone.seen.scaled(2, 4) == deep.seen and (alone.head, alone.entry) == (deep.head, deep.entry)
    assert [one.cost for one in deep.adapters["lora"]] == [one.cost.scaled(2, 4) for one in alone.adapters["lora"]]


@pytest.mark.parametrize("layers", [2, 5])
def test_all_layers_take_no_less_than_a_few(layers: int) -> None:
    own = backbone_of("llama", layers=layers)
    forward, backward = profiler._deep(own, Stopwatch(perf_counter, CPU, 0.5))
    assert min(forward, backward) >= 1 and ((forward, backward) == (1, 1) or layers > DEPTH)


def test_linears_are_split_as_their_roles_say(backbone: Backbone) -> None:
    own = [op for op in backbone.attach_points.values() if op.layer == 0]
    assert shardable(own, 2) and not shardable(own, 7) and not shardable([], 2)
    forward, backward = ShardedTrial(own, 2, 16, Stopwatch(iter(count()).__next__, CPU, 1.0))()
    assert (forward, backward) == (1, 1)


def test_turns_go_on_until_the_budget_is_spent_and_long_trials_take_few() -> None:
    time_s = [0.0]

    def taking(seconds: float) -> interleaved.Trial:
        def trial() -> tuple[float, ...]:
            ran.append(seconds)
            time_s[0] += seconds
            return (seconds,)

        return trial

    ran: list[float] = []
    watch = Stopwatch(lambda: time_s[0], CPU, 100.0)
    found = watch.timed({0.1: taking(0.1), 3.0: taking(3.0)}, share=0.5)
    assert found == {0.1: (0.1,), 3.0: (3.0,)}
    assert ran.count(3.0) == interleaved.LEAST and ran.count(0.1) == 1 + interleaved.MOST
    ran.clear()
    in_a_hurry = Stopwatch(watch.clock, CPU, 0.5).timed({0.1: taking(0.1)}, share=0.1)
    assert in_a_hurry == {0.1: (0.1,)} and ran == [0.1, 0.1]
    grown = watch.timed({size: taking(size) for size in (30.0, 1.0, 40.0, 2.0)}, share=0.0, growing=True)
    assert list(grown) == [30.0, 1.0], "the first always counts, and none after one that takes too much"


def test_a_burst_and_one_lucky_run_do_not_count() -> None:
    assert typical([(1.0, 5.0), (1.1, 5.1), (9.0, 5.2), (1.2, 50.0), (0.2, 5.3)]) == (1.1, 5.2)
    assert typical([(2.0,), (1.0,)]) == (1.0,)


def test_rows_that_were_dearer_than_fewer_are_timed_again() -> None:
    """A burst goes; what is dearer every time stays; nothing else runs."""
    ran = []

    def trial(rows: int, seconds: float) -> interleaved.Trial:
        return lambda: (ran.append(rows), (seconds / 2, seconds / 2))[1]

    found = {64: (0.5, 0.5), 128: (0.9, 0.9), 256: (2.4, 2.4), 512: (3.4, 3.4), 1024: (9.0, 9.0)}
    trials = {64: trial(64, 9), 128: trial(128, 9), 256: trial(256, 3.5), 512: trial(512, 9), 1024: trial(1024, 19)}
    assert settled(found, trials) == {**found, 256: (1.75, 1.75)}
    assert ran == [256] * 3 + [1024] * 3


def test_repeats_that_are_far_apart_are_seen() -> None:
    assert spread_of([(1.0, 1.0)] * 4) == 0.0
    assert spread_of([(1.0,), (1.02,), (1.04,), (9.0,)]) > spread_of([(1.0,), (1.01,), (1.02,), (1.03,)]) > 0
    watch, times = Stopwatch(iter(count()).__next__, CPU, 100.0), iter([1.0, 3.0] * 20)
    watch.timed({"a": lambda: (next(times),)}, share=0.5)
    assert watch.spread > 0.5 and Stopwatch(watch.clock, CPU, 1.0).spread == 0.0


def _state(backbone: Backbone) -> str:
    """Everything of the model that a measurement could change."""
    digest = hashlib.sha256()
    for name, value in backbone.model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    owned = [name for name, value in backbone.model.named_parameters() if value.requires_grad or value.grad is not None]
    hooks = [name for name, one in backbone.model.named_modules() if one._forward_hooks or one._backward_hooks]
    in_progress = (backbone.slot.current, backbone.embedding.served, backbone.embedding.asked)
    return f"{digest.hexdigest()} {owned} {hooks} {in_progress} {len(backbone.blocks)}"
