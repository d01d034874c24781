"""The yardstick measured: padding, side and split change nothing, fp64 is fp64, gradients are the true ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from muxtune.data.types import TokenSequence
from tests.exact import exact_fp64
from tests.reference import (
    LoraPair,
    ReferenceResult,
    ReferenceTask,
    random_lora,
    relative_difference,
    train_reference,
)
from tests.sequences import random_sequences
from tests.tiny import SUPPORTED, tiny_model

LENGTHS = (3, 30, 7, 60)


def _task(model: torch.nn.Module, steps: int = 2, **changes: object) -> ReferenceTask:
    batches = [random_sequences(LENGTHS, seed=step, first_index=4 * step) for step in range(steps)]
    task = ReferenceTask(batches=batches, init=random_lora(model, r=4, seed=1), r=4, weight_decay=0.1)
    return replace(task, **changes)


def _keep(attach_name: str, example: int, positions: torch.Tensor, step: int, channels: int) -> torch.Tensor:
    """A stand-in for a counter hash: depends on each argument, on nothing else."""
    seed = sum(map(ord, attach_name)) * 1_000_003 + example * 1009 + step
    noise = torch.rand(1000, channels, generator=torch.Generator().manual_seed(seed))
    return noise[positions] > 0.3


def _assert_equal(one: ReferenceResult, other: ReferenceResult, tolerance: float = 1e-12) -> None:
    assert one.losses == pytest.approx(other.losses, rel=tolerance)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=tolerance)
    assert relative_difference(one.gradients, other.gradients) < tolerance
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        for a_T, b_T in zip(mine, theirs, strict=True):
            assert torch.allclose(a_T, b_T, rtol=tolerance, atol=tolerance)
    # AdamW divides by the root of the second moment: where a gradient is nearly zero it amplifies rounding.
    assert relative_difference(one.adapter, other.adapter) < 1e4 * tolerance


@pytest.mark.parametrize("arch", SUPPORTED)
def test_in_exact_fp64_a_padded_batch_equals_its_sequences_alone(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    task = _task(model)
    with exact_fp64():
        padded = train_reference(model, task)
        _assert_equal(padded, train_reference(model, replace(task, micro_batch=1)))
        _assert_equal(padded, train_reference(model, replace(task, micro_batch=2)))
    assert padded.grad_norms[0] > 1e-3
    assert relative_difference(padded.adapter, task.init) > 1e-4


@pytest.mark.parametrize("arch", ["llama", "gpt2", "opt", "gemma2"])
def test_dropout_masks_follow_the_sequence_through_any_padding_and_split(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    task = _task(model, lora_dropout=0.3, dropout_mask=_keep)
    with exact_fp64():
        padded = train_reference(model, task)
        _assert_equal(padded, train_reference(model, replace(task, micro_batch=1)))
        _assert_equal(padded, train_reference(model, replace(task, padding="left", micro_batch=2)))
        without = train_reference(model, replace(task, lora_dropout=0.0))
    assert abs(without.losses[0] - padded.losses[0]) > 1e-5


def test_a_mask_that_keeps_all_only_scales() -> None:
    """1/(1-p) times everything kept is the same as a larger alpha: the injected layer is where peft's was."""
    model = tiny_model("llama", dtype=torch.float64)

    def keep_all(attach_name: str, example: int, positions: torch.Tensor, step: int, channels: int) -> torch.Tensor:
        return torch.ones(len(positions), channels, dtype=torch.bool)

    task = _task(model, lora_alpha=8, lora_dropout=0.5, dropout_mask=keep_all)
    with exact_fp64():
        _assert_equal(train_reference(model, task), train_reference(model, _task(model, lora_alpha=16)))


class _NoNarrowing(TorchDispatchMode):
    """Fails at the first operation that takes fp64 in and gives fp32 out."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple) else (out,)
        given = [value.dtype for value in args if isinstance(value, torch.Tensor)]
        if torch.float64 in given:
            narrow = [value for value in results if isinstance(value, torch.Tensor) and value.dtype == torch.float32]
            assert not narrow, f"{func} made fp32 of fp64"
        return out


def _pass(model: torch.nn.Module) -> None:
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    attended[0, 15:] = 0
    model(input_ids=ids, attention_mask=attended, labels=ids).loss.backward()


@pytest.mark.parametrize("arch", SUPPORTED)
def test_exact_fp64_leaves_no_cast_to_fp32(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    with pytest.raises(AssertionError, match="made fp32 of fp64"), _NoNarrowing():
        _pass(model)
    with exact_fp64(), _NoNarrowing():
        _pass(model)


def test_exact_fp64_ends_with_its_block_and_leaves_fp32_alone() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with exact_fp64():
        assert x.float().dtype == x.to(torch.float32).dtype == x.to("cpu", dtype=torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float64
        half = torch.ones(3, dtype=torch.bfloat16)
        assert half.float().dtype == half.to(torch.float32).dtype == torch.float32
    assert x.float().dtype == torch.float32
    assert not isinstance(torch.overrides._get_current_function_mode(), TorchFunctionMode)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "opt-350m"])
def test_first_gradients_are_the_slope_of_the_loss(arch: str) -> None:
    """Central differences along the gradient give its norm: a cast to fp32 on the way would be off by far more."""
    model = tiny_model(arch, dtype=torch.float64)
    task = _task(model, steps=1)

    def loss_at(distance: float) -> float:
        moved = {
            name: LoraPair(*(m.double() + distance * g for m, g in zip(pair, gradients[name], strict=True)))
            for name, pair in task.init.items()
        }
        return train_reference(model, replace(task, init=moved)).losses[0]

    with exact_fp64():
        result = train_reference(model, task)
        gradients, norm = result.gradients, result.grad_norms[0]
        step = 1e-6 / norm
        slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(norm**2, rel=1e-7)


def test_loss_is_the_mean_over_the_trained_tokens_of_the_whole_batch() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    task = _task(model, steps=1, micro_batch=1)
    with exact_fp64():
        result = train_reference(model, task)
    batch: tuple[TokenSequence, ...] = tuple(task.batches[0])
    trained = sum(sequence.trained_tokens for sequence in batch)
    total = sum(
        float(logprobs[torch.from_numpy(sequence.mask.copy())].sum())
        for sequence, logprobs in zip(batch, result.logprobs[0], strict=True)
    )
    assert result.losses[0] == pytest.approx(-total / trained, rel=1e-12)


def test_schedule_warms_up_decays_and_clipping_reports_the_norm_before() -> None:
    model = tiny_model("llama")
    task = _task(model, steps=4, warmup_steps=1, learning_rate=1e-2, max_grad_norm=1e-3)
    result = train_reference(model, task)
    assert result.learning_rates == pytest.approx([0.0, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert result.grad_norms[0] > 1e-2
    squares = sum(float(g.square().sum()) for pair in result.gradients.values() for g in pair)
    assert result.grad_norms[0] == pytest.approx(squares**0.5, rel=1e-5)


def test_the_callers_model_stays_as_it_was() -> None:
    model = tiny_model("llama")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_reference(
        model,
        _task(model, targets=("q_proj", "v_proj"), init=random_lora(model, r=4, seed=1, targets=("q_proj", "v_proj"))),
    )
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].grad is None for name in before)
