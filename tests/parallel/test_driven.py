"""Runs over two ranks: what they leave is what one device leaves, and one goes on with what the other began."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from muxtune.engine import agreement, engine
from muxtune.engine.executor import Executor
from muxtune.errors import AdapterError
from muxtune.models.sources import ModelFolder
from muxtune.parallel.mesh import TensorAxis
from muxtune.plan.trace import schedule_from, schedule_line
from muxtune.plan.types import LossSpec, MicroBatch, OptimStep, RoundSchedule, SequenceRef, WorkItem
from muxtune.spec.peft import BitFit, PeftBase
from muxtune.spec.run import RunSpec
from tests.engine.runs import STEPS, job, metrics, newest_step, run_of, status, stop_after, train, write_data
from tests.parallel.driven import Driven, drive
from tests.parallel.ranks import RankGroup

TOLERANCE = 1e-9
TYPES: dict[str, dict[str, object]] = {
    "rslora": {"r": 4, "use_rslora": True},
    "ia3": {"type": "ia3"},
    "bitfit": {"type": "bitfit"},
    "bottleneck": {"type": "bottleneck"},
    "norms": {"type": "ln_tuning"},
    "prefix": {"type": "prefix_tuning", "num_virtual_tokens": 4},
    "prompt": {"type": "prompt_tuning", "num_virtual_tokens": 3},
}
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _run(folder: Folder, data: Path, output: Path, **keys: object) -> RunSpec:
    jobs = [job(data, name) for name in STEPS]
    model = folder("llama-uneven")
    return run_of(model, output, jobs, dtype="fp64", threads=1, block="transformers", policy="fuse-all", **keys)


def _drive(pair: RankGroup, run: RunSpec, cache: Path, rounds: int | None = None, **options: bool) -> list[Driven]:
    return pair.ask(drive, run, cache, options, rounds)


@pytest.fixture(scope="module")
def alone(folder: Folder, data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one device comes to."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(_run(folder, data, output), cache_dir=cache)
    return output


@pytest.fixture(scope="module")
def together(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What two ranks come to."""
    output = tmp_path_factory.mktemp("together") / "run"
    for driven in _drive(pair, _run(folder, data, output), cache):
        assert driven.error == ""
    return output


def _assert_close(one: Path, other: Path, tolerance: float) -> None:
    """The same files, the same history, tensors within `tolerance` (0: to the bit)."""
    for name, steps in STEPS.items():
        ours, theirs = one / name, other / name
        assert status(ours) == status(theirs) == "completed"
        assert newest_step(ours) == newest_step(theirs) == steps
        newest = f"checkpoints/step-{steps:08d}"
        for file in ("adapter_model.safetensors", f"{newest}/adapter.safetensors", f"{newest}/optimizer.safetensors"):
            mine, his = load_file(ours / file), load_file(theirs / file)
            assert mine.keys() == his.keys()
            for key, value in mine.items():
                assert value.shape == his[key].shape and value.dtype == his[key].dtype
                assert float((value - his[key]).abs().max()) <= tolerance, (name, file, key)
        assert (ours / "adapter_config.json").read_text() == (theirs / "adapter_config.json").read_text()
        for mine_row, his_row in zip(metrics(ours), metrics(theirs), strict=True):
            assert mine_row == pytest.approx(his_row, rel=0, abs=max(tolerance, 1e-15))


def test_two_ranks_leave_what_one_device_leaves(alone: Path, together: Path) -> None:
    _assert_close(together, alone, TOLERANCE)
    ours, theirs = (
        json.loads((run / f"sql/checkpoints/step-{STEPS['sql']:08d}/state.json").read_text())
        for run in (together, alone)
    )
    assert ours == theirs


def test_each_goes_on_with_what_the_other_began(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path, alone: Path, together: Path
) -> None:
    """One device, then ranks, then one device; ranks, then one device, then ranks. And ranks with their own: to the
    bit."""
    first = _run(folder, data, tmp_path / "first")
    train(first, cache_dir=cache, stop=stop_after(3))
    assert not any(one.error for one in _drive(pair, first, cache, 3, resume=True))
    train(first, cache_dir=cache, resume=True)
    _assert_close(Path(first.output_dir), alone, TOLERANCE)
    second = _run(folder, data, tmp_path / "second")
    assert not any(one.error for one in _drive(pair, second, cache, 4))
    train(second, cache_dir=cache, stop=stop_after(4), resume=True)
    assert not any(one.error for one in _drive(pair, second, cache, resume=True))
    _assert_close(Path(second.output_dir), alone, TOLERANCE)
    third = _run(folder, data, tmp_path / "third")
    assert not any(one.error for one in _drive(pair, third, cache, 5))
    assert not any(one.error for one in _drive(pair, third, cache, resume=True))
    _assert_close(Path(third.output_dir), together, 0)


def test_two_stages_leave_what_one_device_leaves_and_go_on_with_what_it_began(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path, alone: Path
) -> None:
    staged = _run(folder, data, tmp_path / "staged").model_copy(update={"pp": 2})
    assert [one.error for one in _drive(pair, staged, cache)] == ["", ""]
    _assert_close(tmp_path / "staged", alone, TOLERANCE)
    first = _run(folder, data, tmp_path / "first")
    train(first, cache_dir=cache, stop=stop_after(2))
    assert [one.error for one in _drive(pair, first.model_copy(update={"pp": 2}), cache, 4, resume=True)] == ["", ""]
    assert [one.error for one in _drive(pair, first, cache, resume=True)] == ["", ""]
    _assert_close(tmp_path / "first", alone, TOLERANCE)


def test_ranks_go_on_with_what_the_fast_block_began(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path, alone: Path
) -> None:
    run = _run(folder, data, tmp_path / "run").model_copy(update={"block": "auto"})
    train(run, cache_dir=cache, stop=stop_after(3))
    assert json.loads((tmp_path / "run/sql/job.json").read_text())["block"] == "fast"
    assert not any(one.error for one in _drive(pair, run, cache, 3, resume=True))
    train(run, cache_dir=cache, resume=True)
    _assert_close(tmp_path / "run", alone, 1e-3)  # the two blocks' angles differ in fp32's last bits


def test_an_adapter_that_starts_from_a_folder(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path, alone: Path
) -> None:
    jobs = [job(data, "more", like="sql", adapter_path=str(alone / "sql"), num_train_epochs=1)]
    keys = {"dtype": "fp64", "threads": 1, "block": "transformers"}
    runs = [run_of(folder("llama-uneven"), tmp_path / name, jobs, **keys) for name in ("one", "two")]
    train(runs[0], cache_dir=cache)
    assert not any(one.error for one in _drive(pair, runs[1], cache))
    one, two = (load_file(tmp_path / name / "more/adapter_model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(one[key], two[key], rtol=0, atol=TOLERANCE) for key in one)


@pytest.mark.full
def test_every_type_goes_on_under_another_layout(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path
) -> None:
    """One device, then two ranks, then one device again: as one device all along."""
    jobs = [job(data, name, like="text", peft=peft, learning_rate=1e-3) for name, peft in TYPES.items()]
    keys = {"dtype": "fp64", "threads": 1, "block": "transformers", "policy": "fuse-all"}
    one, two = (run_of(folder("llama-uneven"), tmp_path / name, jobs, **keys) for name in ("one", "two"))
    train(one, cache_dir=cache)
    train(two, cache_dir=cache, stop=stop_after(3))
    assert not any(driven.error for driven in _drive(pair, two, cache, 3, resume=True))
    train(two, cache_dir=cache, resume=True)
    newest = f"checkpoints/step-{STEPS['text']:08d}"
    for name in TYPES:
        for file in (f"{newest}/adapter.safetensors", f"{newest}/optimizer.safetensors"):
            ours, theirs = (load_file(tmp_path / run / name / file) for run in ("two", "one"))
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert torch.allclose(value, theirs[key], rtol=0, atol=TOLERANCE), (name, key)


def test_what_cannot_be_split_fails_its_own_job(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path, alone: Path
) -> None:
    jobs = [job(data, "sql"), job(data, "odd", like="text", peft={"type": "bitfit"})]
    run = run_of(folder("llama-uneven"), tmp_path / "run", jobs, dtype="fp64", threads=1)
    refused, _ = pair.ask(drive, run, cache, {}, None, _no_rule_for_bitfit)
    assert "AdapterError" in refused.error and "bitfit has no rule" in refused.error
    first, second = pair.ask(drive, run, cache, {"keep_going": True}, None, _no_rule_for_bitfit)
    assert first.error == second.error == ""
    assert ("odd", "failed") in {(task, kind) for task, kind, _ in first.events}
    assert status(tmp_path / "run/sql") == "completed"


def test_a_pass_that_raises_on_all_ranks_fails_its_task_alone(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path, together: Path
) -> None:
    run = _run(folder, data, tmp_path / "run")
    first, second = pair.ask(drive, run, cache, {}, None, _break_text_everywhere)
    assert first.error == second.error == ""
    (told,) = [message for task, kind, message in first.events if (task, kind) == ("text", "failed")]
    assert "deliberate" in told
    for name in ("sql", "chat"):
        ours, theirs = (load_file(one / name / "adapter_model.safetensors") for one in (tmp_path / "run", together))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.full
def test_a_pass_that_raises_on_one_rank_ends_the_run_on_all(
    folder: Folder, data: Path, cache: Path, tmp_path: Path
) -> None:
    """The rank that raised says so and ends; here it stays, so its silence is what ends the other."""
    group = RankGroup(2, timeout_s=6)
    try:
        first, second = group.ask(drive, _run(folder, data, tmp_path / "run"), cache, {}, None, _break_text_on_one)
    finally:
        group.close()
    assert first.lost and second.lost
    assert "rank 1: failed alone: ValueError: deliberate" in second.error
    assert first.error.startswith("RankError: rank 0")


def test_other_weights_on_a_rank_are_named(
    pair: RankGroup, folder: Folder, data: Path, cache: Path, tmp_path: Path
) -> None:
    for driven in pair.ask(drive, _run(folder, data, tmp_path / "run"), cache, {}, None, _other_weights):
        assert driven.lost and "rank 1: failed alone" in driven.error and "has other weights here" in driven.error


def _no_rule_for_bitfit(axis: TensorAxis, patch: pytest.MonkeyPatch) -> None:
    build = engine.sharded_adapter

    def refusing(spec: PeftBase, *arguments: object, **keys: object) -> object:
        if isinstance(spec, BitFit):
            raise AdapterError("bitfit has no rule")
        return build(spec, *arguments, **keys)  # type: ignore[arg-type]

    patch.setattr(engine, "sharded_adapter", refusing)


def _break_text_everywhere(axis: TensorAxis, patch: pytest.MonkeyPatch) -> None:
    """From its third step on, each pass that trains `text` raises."""
    run = Executor._micro_batch

    def breaking(self: Executor, batch: MicroBatch) -> object:
        trained = [item.task for item in batch.items if item.kind == "train"]
        if "text" in trained and self._tasks["text"].step >= 2:
            raise ValueError("deliberate")
        return run(self, batch)

    patch.setattr(Executor, "_micro_batch", breaking)


def _break_text_on_one(axis: TensorAxis, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agreement, "GRACE_S", 1.0)
    if axis.rank:
        _break_text_everywhere(axis, patch)


def _other_weights(axis: TensorAxis, patch: pytest.MonkeyPatch) -> None:
    if axis.rank:
        patch.setattr(ModelFolder, "weights_sha256", property(lambda self: "0" * 64))


def test_a_schedule_survives_the_way() -> None:
    items = (
        WorkItem("a", "train", "a/train", (SequenceRef(3, 5), SequenceRef(4, 6, shared=2)), LossSpec(7)),
        WorkItem(None, "reference", "reference", (SequenceRef(0, 4, 2, 9),)),
        WorkItem("b", "train", "b/train", (SequenceRef(0, 4), SequenceRef(1, 4)), LossSpec(1, "dpo", 0.1)),
    )
    batch = MicroBatch(2, 1, items, width=8, recompute=True, keep=False)
    schedule = RoundSchedule(4, (batch, OptimStep("a"), OptimStep("b", 1e-3 / 3)))
    assert schedule_from(schedule_line(schedule)) == schedule
