"""Sequences longer than a chunk: cut into pieces they train as they would whole, whoever trains beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.failure import PassError
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch
from muxtune.spec.job import JobSpec
from tests.engine.build import Trial, assert_same_bits, backbone_of, exact, reference, train
from tests.sequences import random_sequences

LENGTHS = (60, 9, 37, 3)
SPECS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "lora_dropout": 0.2},
    "rslora": {"type": "rslora"},
    "dora": {"type": "dora", "lora_dropout": 0.2},
    "pissa": {"type": "pissa"},
    "ia3": {"type": "ia3"},
    "houlsby": {"type": "houlsby"},
    "pfeiffer": {"type": "pfeiffer"},
    "parallel": {"type": "parallel"},
    "bitfit": {"type": "bitfit"},
    "ln_tuning": {"type": "ln_tuning"},
    "shira": {"type": "shira"},
    "prefix": {"type": "prefix_tuning", "num_virtual_tokens": 5},
    "prompt": {"type": "prompt_tuning", "num_virtual_tokens": 5},
    "long prompt": {"type": "prompt_tuning", "num_virtual_tokens": 20},  # longer than a chunk
}


def _attached(engine: Engine, peft: dict[str, Any], chunk_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> Task:
    """A task whose adapter is somewhere else than at its start."""
    job = JobSpec(name="only", datasets=["unread.jsonl"], peft=peft, max_steps=1, per_device_train_batch_size=4)
    task = engine.attach(job, Sequences(random_sequences(lengths, seed=2)), chunk_tokens=chunk_tokens)
    generator = torch.Generator().manual_seed(5)
    values = task.adapter.parameters.values
    with torch.no_grad():
        values += 0.05 * torch.randn(values.shape, generator=generator, dtype=values.dtype)
    task.adapter.refresh()
    return task


def _gradient(backbone: Backbone, peft: dict[str, Any], chunk_tokens: int, **options: Any) -> tuple[float, Tensor]:
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        task = _attached(engine, peft, chunk_tokens)
        outcome = engine.forward_backward({task: task.data.train})["only"]
    assert outcome.input_tokens == sum(LENGTHS)
    return outcome.loss_sum / outcome.tokens, task.adapter.parameters.gradient.clone()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_the_gradient_is_that_of_whole_sequences_for_every_type(arch: str, name: str) -> None:
    backbone = backbone_of(arch, torch.float64)
    loss, gradient = _gradient(backbone, SPECS[name], 1000)
    own_loss, own_gradient = _gradient(backbone, SPECS[name], 16)
    assert own_loss == pytest.approx(loss, rel=1e-11)
    assert bool(gradient.any()) and float((own_gradient - gradient).norm()) <= 1e-10 * float(gradient.norm())


def test_the_plain_twin_cuts_as_well() -> None:
    backbone = backbone_of("llama", torch.float64)
    loss, gradient = _gradient(backbone, SPECS["lora"], 16)
    plain_loss, plain_gradient = _gradient(backbone, SPECS["lora"], 16, plain=True)
    assert plain_loss == pytest.approx(loss, rel=1e-11) and torch.allclose(plain_gradient, gradient, rtol=1e-9)


@pytest.mark.parametrize("name", ["lora", "prefix", "prompt"])
def test_with_recomputation_to_the_same_bits(name: str) -> None:
    backbone = backbone_of("llama")
    loss, gradient = _gradient(backbone, SPECS[name], 16)
    again_loss, again = _gradient(backbone, SPECS[name], 16, recompute=True)
    assert again_loss == loss and torch.equal(again, gradient)


TRIALS = (
    Trial("cut", [60, 9, 37, 3] * 2, r=4, chunk_tokens=16, seed=1),
    Trial("dropped", [50, 41, 20], batch=3, r=8, dropout=0.3, chunk_tokens=20, seed=2),
    Trial("whole", [7, 12, 30], batch=3, r=3, seed=3),
)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_several_steps_are_those_of_transformers_and_peft(arch: str) -> None:
    ours = train(backbone_of(arch, torch.float64), TRIALS)
    for trial in TRIALS:
        expected = reference(arch, trial, torch.float64)
        assert ours[trial.name].losses == pytest.approx(expected.losses, rel=1e-9)
        for name, pair in ours[trial.name].pairs.items():
            for own, other in zip(pair, expected.adapter[name], strict=True):
                assert torch.allclose(own, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_together_is_alone_bit_for_bit(dtype: torch.dtype) -> None:
    backbone = backbone_of("llama", dtype)
    if not Engine(backbone).row_invariant:
        pytest.skip("rows of a product depend on the batch on this machine")
    together = train(backbone, TRIALS)
    for trial in TRIALS:
        assert_same_bits(together[trial.name], train(backbone, (trial,))[trial.name])


@pytest.mark.parametrize("name", ["lora", "prefix", "prompt"])
def test_log_probabilities_are_those_of_the_whole_and_come_in_its_order(name: str) -> None:
    backbone = backbone_of("mistral", torch.float64)
    found = []
    with exact(torch.float64):
        for chunk_tokens in (1000, 16):
            engine = Engine(backbone)
            task = _attached(engine, SPECS[name], chunk_tokens)
            found.append(engine.forward({task: task.data.train})["only"].logprobs)
    whole, cut = found
    assert whole is not None and cut == pytest.approx(whole, rel=1e-10)


def test_a_pass_has_no_more_rows_than_a_chunk() -> None:
    engine = Engine(backbone_of())
    task = _attached(engine, SPECS["lora"], 16)
    record = engine.execute(engine.schedule([task.participant()]))
    assert max(action.rows for action in record.actions) == 16
    kinds = [item.kind for action in record.schedule.actions if isinstance(action, MicroBatch) for item in action.items]
    assert kinds.count("carry") == 3 + 2  # all pieces of 60 and 37 but their tails


def test_a_schedule_that_breaks_off_leaves_no_sequence_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("llama")
    engine = Engine(backbone)
    task = _attached(engine, SPECS["lora"], 16)
    passes = 0
    hidden = backbone.hidden

    def breaking(*arguments: Any, **options: Any) -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 7:
            raise RuntimeError("the device is on fire")
        return hidden(*arguments, **options)

    monkeypatch.setattr(backbone, "hidden", breaking)
    with pytest.raises(PassError, match="on fire"):
        engine.execute(engine.schedule([task.participant()]))
    assert not engine._executor._cut.carry.slots
    record = engine.execute(engine.schedule([task.participant()]))
    expected = train_alone(backbone)
    assert [action.step for action in record.actions if action.step] == expected


def train_alone(backbone: Backbone) -> list[Any]:
    engine = Engine(backbone)
    task = _attached(engine, SPECS["lora"], 16)
    return [action.step for action in engine.execute(engine.schedule([task.participant()])).actions if action.step]
