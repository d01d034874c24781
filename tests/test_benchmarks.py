"""The benchmark measures what it says: loads, sides that train alike, floor, timing and memory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import baselines, bench, check_gpu, memory, numerics, race
from benchmarks.adapters import adapter_costs
from benchmarks.baselines import Recipe
from benchmarks.chunks import ChunkCosts
from benchmarks.floor import GemmPass, Rows, floor_side, needed, passes_of
from benchmarks.lengths import DATA_SETS, EXAMPLES, measure, stored_lengths
from benchmarks.loads import light, medium, non_uniform
from benchmarks.report import show_adapters
from benchmarks.sides import EngineSide, engine_side, muxtune_tasks
from benchmarks.timing import Timings, interleave, ratio
from muxtune.data.types import TokenSequence
from muxtune.models.attach import LinearOp
from muxtune.plan.types import LossSpec, MicroBatch, OptimStep, RoundSchedule, SequenceRef, WorkItem
from tests.contenders import HELD_BYTES
from tests.engine.build import backbone_of
from tests.reference import LoraPair, ReferenceTask, train_reference
from tests.tiny import tiny_model
from tests.tiny_tokenizer import VOCAB

OURS = ("fuse-all", "sequential")
DATA = Path(__file__).parents[2] / "shared" / "data"


def test_light_is_one_example_of_16_tokens_a_task() -> None:
    load = light(3, vocab=VOCAB)
    assert len(load.tasks) == 8
    assert load.steps == 3
    assert load.padding() == 1.0
    assert load.real_tokens(0) == 8 * 16
    assert load.trained_tokens(0) == 8 * 8


def test_medium_is_one_example_of_64_tokens_a_task() -> None:
    load = medium(2, vocab=VOCAB)
    assert (load.name, len(load.tasks), load.steps) == ("medium", 8, 2)
    assert load.real_tokens(1) == 8 * 64 and load.trained_tokens(1) == 8 * 32
    batch = light(3, vocab=VOCAB, tasks=1, tokens=10, micro_batch=4).tasks[0][2]
    assert [len(sequence) for sequence in batch] == [10] * 4 and batch[3].index == 11


def test_non_uniform_has_the_lengths_of_its_data_sets() -> None:
    load = non_uniform(5, vocab=VOCAB)
    stored = stored_lengths()
    names = ["sst2"] * 3 + ["openbookqa"] * 3 + ["rte"] * 2
    for task, name in zip(load.tasks, names, strict=True):
        known = {(one.prompt, one.completion) for one in stored[name]}
        assert [len(batch) for batch in task] == [4] * 5
        for sequence in (sequence for batch in task for sequence in batch):
            trained = sequence.trained_tokens
            assert (len(sequence) - trained, trained) in known
            assert sequence.mask[-trained:].all()
    assert [len(one) for one in load.tasks[0][0]] != [len(one) for one in load.tasks[1][0]]
    assert load.padding() > 1.2
    assert load.tasks[0][0][0].ids.tolist() == non_uniform(5, vocab=VOCAB).tasks[0][0][0].ids.tolist()


def test_stored_lengths_are_those_of_the_data(tiny_llama: Path) -> None:
    stored = stored_lengths()
    assert {name: len(lengths) for name, lengths in stored.items()} == dict.fromkeys(DATA_SETS, EXAMPLES)
    if not DATA.is_dir():
        pytest.skip("the data sets are not on this machine")
    # Another tokenizer, so other counts; the order of the data sets by length is a fact of the data.
    measured = measure(DATA, tiny_llama)
    for one, two in zip(stored["rte"], measured["rte"], strict=True):
        assert one.prompt < two.prompt, "320 tokens of vocabulary need more of them"
        assert one.completion <= two.completion


def test_the_baselines_are_the_reference_training() -> None:
    model = tiny_model("llama")
    load, recipe = non_uniform(3, vocab=VOCAB, micro_batch=2), Recipe(r=4, learning_rate=1e-2, schedule_steps=10)
    init = baselines.initial_matrices(model, recipe)
    alone = baselines.task_by_task(model, load, recipe, init)
    switched = baselines.many_adapters(model, load, recipe, init)
    for step in range(load.steps):
        alone.step(step)
        switched.step(step)
    for task, batches in enumerate(load.tasks):
        reference = train_reference(
            model,
            ReferenceTask(
                batches=batches,
                init={name: LoraPair(*pair) for name, pair in init.items()},
                r=4,
                learning_rate=1e-2,
                total_steps=10,
            ),
        )
        assert alone.losses[task] == pytest.approx(reference.losses, rel=1e-5)
        assert switched.losses[task] == pytest.approx(reference.losses, rel=1e-5)
        assert alone.losses[task][0] != pytest.approx(alone.losses[task][2], rel=1e-3)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_every_optimizer_kind_is_adamw(kind: baselines.OptimizerKind) -> None:
    model, load = tiny_model("llama"), light(3, vocab=VOCAB, tasks=1)
    init = baselines.initial_matrices(model, Recipe())
    plain = baselines.task_by_task(model, load, Recipe(learning_rate=1e-2), init)
    other = baselines.task_by_task(model, load, Recipe(learning_rate=1e-2, optimizer=kind), init)
    for step in range(3):
        plain.step(step)
        other.step(step)
    assert other.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)


def test_sides_share_the_backbone_and_leave_it_alone() -> None:
    model, load = tiny_model("llama"), light(1, vocab=VOCAB, tasks=2)
    before = [parameter.clone() for parameter in model.parameters()]
    side = baselines.task_by_task(model, load, Recipe(), baselines.initial_matrices(model, Recipe()))
    side.step(0)
    q_proj = [run.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight for run in side.runs]
    assert q_proj[0].data_ptr() == q_proj[1].data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_rounds_interleave_and_the_order_turns() -> None:
    calls: list[tuple[str, int]] = []
    sides = {name: lambda step, name=name: calls.append((name, step)) for name in "abc"}
    timings = interleave(sides, 3, warmup=1)
    assert [name for name, _ in calls] == list("abcbcacababc")
    assert [step for _, step in calls] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {len(timing.seconds) for timing in timings.values()} == {3}


def test_ratio_pairs_the_rounds() -> None:
    assert ratio(Timings((2.0, 20.0, 4.0)), Timings((1.0, 10.0, 2.0))) == 2.0
    slept = interleave({"slow": lambda step: time.sleep(0.02), "fast": lambda step: None}, 3)
    assert ratio(slept["slow"], slept["fast"]) > 5
    assert 0.015 < slept["slow"].median_s < 0.2


def _multiply_adds(out: tuple[int, ...], inner: int) -> int:
    return math.prod(out) * inner


@pytest.mark.parametrize("tokens", [(16, 32), (16, 16)], ids=["one by one", "batched"])
def test_the_floor_runs_the_products_of_a_pass(monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...]) -> None:
    """Counted against the arithmetic: multiply-adds of backbone, adapters and head."""
    model, rows = tiny_model("llama"), Rows(tokens, trained=5)
    done = 0
    mm, bmm, baddbmm_ = torch.mm, torch.bmm, torch.Tensor.baddbmm_

    def counted(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            nonlocal done
            done += _multiply_adds(out.shape, a.shape[-1])
            return product(a, b, out=out)

        return run

    def counted_baddbmm_(self: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += _multiply_adds(self.shape, a.shape[-1])
        return baddbmm_(self, a, b)

    passes = GemmPass(model, r=4, tasks=2)
    monkeypatch.setattr(torch, "mm", counted(mm))
    monkeypatch.setattr(torch, "bmm", counted(bmm))
    monkeypatch.setattr(torch.Tensor, "baddbmm_", counted_baddbmm_)
    passes.run(rows)
    linears = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    head = linears.pop("lm_head")
    expected = 2 * 16 * head[0] * head[1]  # five rows, filled up
    total = sum(tokens)
    for name, (outputs, inputs) in linears.items():
        first = name.startswith("model.layers.0.self_attn") and "o_proj" not in name
        expected += total * outputs * inputs * (1 if first else 2)
        expected += total * 4 * (3 * outputs + 2 * inputs + (0 if first else inputs))
    assert done == expected
    assert passes.adapter_parameters == sum(4 * sum(shape) for shape in linears.values())


def test_the_floor_has_real_products() -> None:
    """Of one pass: what comes out of the last linear is what the adapters and weights make of the rows that go in."""
    model = tiny_model("llama")
    passes = GemmPass(model, r=4, tasks=3)
    passes.run(Rows((5, 5, 9), trained=3), first=0)
    product = passes._products[-1]
    x_TI, g_TO = (
        passes._buffer(32, product.weight_OI.shape[1], "in"),
        passes._buffer(32, product.weight_OI.shape[0], "out"),
    )
    assert Rows((5, 5, 9), 3).total == len(x_TI) == 32
    h_tR = x_TI[10:19] @ product.members[0].a_NRI[2].T
    torch.testing.assert_close(product.members[0].grad_b_NRO[2], h_tR.T @ g_TO[10:19])


def _one_task(masks: Sequence[Sequence[int]]) -> tuple[TokenSequence, ...]:
    return tuple(
        TokenSequence(place, np.zeros(len(mask), np.int32), np.array(mask, bool)) for place, mask in enumerate(masks)
    )


def test_the_floor_needs_rows_up_to_the_last_that_predicts() -> None:
    sources = {"a": _one_task([(0, 0, 1, 0, 1, 0, 0), (0, 0, 0)]), "b": _one_task([(0, 1, 1, 1)])}
    refs = [SequenceRef(0, 7), SequenceRef(1, 3)]
    items = (
        WorkItem("a", "train", "a", tuple(refs), LossSpec(2)),
        WorkItem("b", "train", "b", (SequenceRef(0, 4),), LossSpec(3)),
    )
    assert needed(RoundSchedule(0, (MicroBatch(0, 0, items), OptimStep("a"))), sources) == (Rows((4, 3), 5),)
    # cut after three tokens: the piece that trains has the row that predicts the last of them in it or not
    pieces = [SequenceRef(0, 4, 3, 7), SequenceRef(0, 3, 0, 7)]
    trains = tuple(
        MicroBatch(0, place, (WorkItem("a", "train", "a", (ref,), LossSpec(2)),)) for place, ref in enumerate(pieces)
    )
    carried = MicroBatch(0, 0, (WorkItem("a", "carry", "a", (pieces[1],)),))
    assert needed(RoundSchedule(0, (carried, *trains)), sources) == (Rows((1,), 1), Rows((3,), 1))


def test_the_floor_has_the_passes_of_its_side() -> None:
    load = non_uniform(2, vocab=VOCAB)
    load = replace(load, tasks=load.tasks[:6])  # RTE is longer than the tiny model's positions
    backbone = backbone_of("llama")
    together, alone = (passes_of(engine_side(backbone, load, Recipe(), policy=policy), load) for policy in OURS)
    assert len(together) == len(alone) == load.steps
    predicted = sum(len(sequence) - 1 for task in load.tasks for sequence in task[1])
    for passes in (together[1], alone[1]):
        assert sum(sum(rows.tokens) for rows in passes) == predicted
        assert sum(rows.trained for rows in passes) == load.trained_tokens(1)
    assert len(together[1]) == 1 and len(alone[1]) == 6
    assert together[1][0].tokens == tuple(rows.tokens[0] for rows in alone[1])
    side = engine_side(backbone, load, Recipe())
    assert passes_of(side, load) == together and all(task.step == 0 for task in side.tasks)


def test_the_floor_allocates_before_it_is_measured() -> None:
    load = non_uniform(3, vocab=VOCAB)
    load = replace(load, tasks=load.tasks[:6])
    side = floor_side(engine_side(backbone_of("llama"), load, Recipe()), load, tiny_model("llama"), r=8)
    held = {key: buffer.data_ptr() for key, buffer in side._products._buffers.items()}
    for step in range(3):
        side.step(step)
    assert held == {key: buffer.data_ptr() for key, buffer in side._products._buffers.items()}


def test_our_sides_train_what_the_baselines_train() -> None:
    load, recipe = non_uniform(3, vocab=VOCAB, micro_batch=2), Recipe(r=4, learning_rate=1e-2)
    load = replace(load, tasks=load.tasks[:6])  # RTE is longer than the tiny model's positions
    backbone = backbone_of("llama")
    model = tiny_model("llama")
    init = baselines.initial_matrices(model, recipe)
    theirs = baselines.task_by_task(model, load, recipe, init)
    fused = engine_side(backbone, load, recipe, init)
    alone = engine_side(backbone, load, recipe, init, policy="sequential")
    for step in range(load.steps):
        for side in (theirs, fused, alone):
            side.step(step)
    assert fused.losses == alone.losses
    for ours, reference in zip(fused.losses, theirs.losses, strict=True):
        assert ours == pytest.approx(reference, rel=1e-5)


def test_fused_is_one_pass_and_alone_one_a_task() -> None:
    load = light(1, vocab=VOCAB)
    passes = {}
    for policy in ("fuse-all", "sequential"):
        side = engine_side(backbone_of("llama"), load, Recipe(), policy=policy)
        schedule = side.engine.schedule([task.participant() for task in side.tasks])
        passes[policy] = [len(action.items) for action in schedule.actions if isinstance(action, MicroBatch)]
    assert passes == {"fuse-all": [8], "sequential": [1] * 8}


def test_a_race_says_whether_all_trained_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    load, recipe = light(4, vocab=VOCAB, tasks=2), Recipe(learning_rate=1e-2)
    fair = race.race(load, backbone_of("llama"), tiny_model("llama"), recipe, default_optimizer=True)
    assert fair.agrees
    assert fair.tokens == (32, 32, 32)
    assert fair.trained_tokens == (16, 16, 16)
    assert {name for name, side in fair.sides.items() if not side.losses} == {race.FLOOR_FUSED, race.FLOOR_ALONE}
    assert 0 < fair.ratios[race.ROOFLINE] < 1
    assert fair.sides[race.FUSED].tokens_per_s == pytest.approx(32 / fair.sides[race.FUSED].median_s)
    # A side that skips one step's update is found out.
    step = EngineSide.step
    monkeypatch.setattr(EngineSide, "step", lambda side, index: _without_training(side, index, step))
    assert not race.race(load, backbone_of("llama"), tiny_model("llama"), recipe).agrees


def _without_training(side: EngineSide, index: int, step: Callable[[EngineSide, int], None]) -> None:
    before = [task.adapter.parameters.values.clone() for task in side.tasks]
    step(side, index)
    if index == 1:
        for task, values in zip(side.tasks, before, strict=True):
            task.adapter.parameters.values.copy_(values)


def test_losses_that_are_no_numbers_do_not_agree() -> None:
    assert race.loss_gap([(1.0, 2.0), (1.0, 2.02)]) == pytest.approx(0.01)
    assert race.loss_gap([(1.0,), (float("nan"),)]) == float("inf")


def test_bench_prints_its_tables_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MEMORY_TASKS", (1,))
    monkeypatch.setattr(bench, "OURS", "tests.contenders:hold")
    monkeypatch.setattr(memory, "PEFT", "tests.contenders:hold")
    out = tmp_path / "bench" / "one.json"
    monkeypatch.setattr(bench, "run_chunks", lambda settings: ChunkCosts((), 0.5, 0.25))
    parts = [option for part in ("light", "memory", "chunks", "long") for option in ("--part", part)]
    parts += ["--tokens", "90", "--chunk", "40"]
    status = bench.main([*parts, "--rounds", "2", "--layers", "1", "--model", str(tiny_llama), "--out", str(out)])
    printed = capsys.readouterr().out
    assert (
        "muxtune, tasks fused" in printed
        and "of roofline" in printed
        and "final losses agree" in printed
        and "PSS GB" in printed
    )
    assert "25.0%" in printed and "in chunks of 40" in printed
    document = json.loads(out.read_text())
    assert status == 0
    assert document["schema"] == 1
    assert document["settings"]["layers"] == 1
    (light_race,) = document["races"]
    assert light_race["agrees"] is True
    assert len(light_race["sides"]["muxtune, tasks fused"]["seconds"]) == 2
    assert all(one["pss_bytes"] > HELD_BYTES for one in document["memory"])
    assert [one["tasks"] for one in document["memory"]] == [1, 1]
    assert document["chunks"]["overhead"] == 0.25 and document["adapters"] is None
    assert document["long"]["agrees"] is True and document["long"]["chunk_alone"]["tokens"] == 40
    assert [one["chunk"] for one in document["long"]["sides"]] == [90, 40, 40]


def test_costs_of_adapters_are_over_the_backbones_own_and_of_every_type() -> None:
    costs = adapter_costs(
        backbone_of("llama"),
        rounds=2,
        counts=(1, 2),
        types=("lora", "ia3", "prompt_tuning"),
        ranks=(2,),
        rank_counts=(2,),
    )
    assert [(one.count, one.peft_type) for one in costs.by_type] == [
        (count, name) for count in (1, 2) for name in ("lora", "ia3", "prompt_tuning")
    ]
    assert all(one.step_ms > 0 and one.share > -1 for one in costs.by_type)
    (by_rank,) = costs.by_rank
    assert by_rank.speedup > 0 and costs.mixed.types == ("lora", "ia3", "prompt_tuning")
    console = Console(record=True, width=120)
    show_adapters(console, costs)
    assert "prompt_tuning" in (text := console.export_text()) and "one after another" in text


def test_our_contender_has_trained_every_task(tiny_llama: Path) -> None:
    side = muxtune_tasks(tiny_llama, 3)
    assert [task.step for task in side.tasks] == [1, 1, 1]
    assert len({task.adapter.parameters.values.data_ptr() for task in side.tasks}) == 3


def test_memory_counts_every_process_and_task() -> None:
    sizes = {
        (tasks, processes): memory.measure("tests.contenders:hold", Path(), tasks=tasks, processes=processes)
        for tasks, processes in ((1, 1), (3, 1), (1, 2))
    }
    one, three, two = sizes.values()
    assert one.not_run is three.not_run is two.not_run is None
    assert HELD_BYTES < one.pss_bytes <= one.rss_bytes
    assert three.pss_bytes - one.pss_bytes == pytest.approx(2 * HELD_BYTES, rel=0.1)
    assert two.rss_bytes == pytest.approx(2 * one.rss_bytes, rel=0.1)
    assert 2 * HELD_BYTES < two.pss_bytes < two.rss_bytes, "libraries are shared between the two"


def test_a_layout_that_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HEADROOM", 0.0)
    measured = memory.measure("tests.contenders:hold", Path(), tasks=1, processes=3)
    assert "GB needed" in (measured.not_run or "")
    assert measured.pss_bytes == 0


def test_a_child_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        memory.measure("tests.contenders:fail", Path(), tasks=1)


@pytest.mark.parametrize("tasks", [1, 3])
def test_the_peft_contender_has_trained_every_task(tiny_llama: Path, tasks: int) -> None:
    side = memory.peft_tasks(tiny_llama, tasks)
    assert isinstance(side, baselines.PeftSide)
    assert [len(losses) for losses in side.losses] == [1] * tasks
    for run in side.runs:
        assert all(run.optimizer.state[parameter]["step"] == 1 for parameter in run.parameters)


def test_the_gpu_check_passes_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu.main(["--device", "cpu", "--tiny", "--no-bench"]) == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and printed.count("ok   ") == 2 * (10 + 4)
    assert "all checks pass" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_check_says_when_it_has_checked_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu.main([]) == check_gpu.NO_DEVICE
    assert "nothing checked" in capsys.readouterr().out


def test_the_gpu_check_finds_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    input_gradient = LinearOp.input_gradient
    with check_gpu.tiny_folder() as folder:
        subject = numerics.Subject(folder, torch.device("cpu"), torch.float32)
        assert next(numerics.checks(subject)).passed
        monkeypatch.setattr(LinearOp, "input_gradient", lambda op, grad: input_gradient(op, grad) * 1.001)
        assert not next(numerics.checks(subject)).passed
