"""How an optimizer batch is split changes nothing: the loss is a mean over all its trained tokens.

reports.md 18 and 19: a batch of lengths 3, 30, 7 and 60 as 4 x 1, 2 x 2 and 1 x 4. Only the product of batch size and
accumulation means anything; the real split is the chunk budget's.
"""

from __future__ import annotations

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.models.backbone import Backbone
from muxtune.plan.types import MicroBatch
from muxtune.spec.job import JobSpec
from tests.engine.build import Trial, attach, backbone_of, exact
from tests.sequences import random_sequences

LENGTHS = (3, 30, 7, 60)
BUDGETS = {1000: 1, 60: 2, 40: 4, 7: 27}  # chunk budget -> passes that it makes of LENGTHS; the last two cut sequences


def _step(backbone: Backbone, budget: int, dropout: float) -> tuple[torch.Tensor, float, float, int]:
    """Gradient, reported loss and norm of one optimizer step, and in how many micro-batches it ran."""
    trial = Trial("only", LENGTHS, dropout=dropout, chunk_tokens=budget, r=8)
    with exact(backbone.dtype):
        engine = Engine(backbone)
        task = attach(engine, trial)
        passes = engine.schedule([task.participant()]).actions
        outcome = engine.forward_backward({task: trial.examples})["only"]
        gradient = task.adapter.parameters.gradient.clone()
        step = engine.optim_step(task)
    assert step.loss == outcome.loss_sum / outcome.tokens and step.tokens == outcome.tokens
    return gradient, step.loss, step.grad_norm, sum(isinstance(action, MicroBatch) for action in passes)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("arch", ["llama-mqa", "gemma2", "gpt2"])
def test_every_split_gives_the_same_gradient_and_the_same_loss(
    arch: str, dtype: torch.dtype, tolerance: float, dropout: float
) -> None:
    backbone = backbone_of(arch, dtype)
    whole, loss, norm, _ = _step(backbone, 1000, dropout)
    for budget, chunks in BUDGETS.items():
        gradient, own_loss, own_norm, passes = _step(backbone, budget, dropout)
        assert passes == chunks
        assert own_loss == pytest.approx(loss, rel=tolerance) and own_norm == pytest.approx(norm, rel=tolerance)
        assert float((gradient - whole).norm()) <= tolerance * float(whole.norm())
    without = _step(backbone, 1000, 0.0)
    assert (without[1] != loss) == (dropout > 0), "dropout drops nothing"


def test_the_mean_over_all_trained_tokens_is_not_the_mean_of_means() -> None:
    """What the reports saw: were each sequence averaged alone, this batch would come out visibly different."""
    backbone = backbone_of("llama", torch.float64)
    with exact(torch.float64):
        engine = Engine(backbone)
        task = attach(engine, Trial("only", LENGTHS))
        examples = task.data.train
        alone = [engine.forward({task: [example]})["only"] for example in examples]
        together = engine.forward({task: examples})["only"]
    means = [outcome.loss_sum / outcome.tokens for outcome in alone]
    assert together.loss_sum == pytest.approx(sum(outcome.loss_sum for outcome in alone), rel=1e-12)
    assert abs(together.loss_sum / together.tokens - sum(means) / len(means)) > 0.01


@pytest.mark.parametrize(("size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_only_the_product_of_batch_size_and_accumulation_means_anything(size: int, accumulation: int) -> None:
    job = JobSpec(
        name="only",
        datasets=["unread.jsonl"],
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        shuffle=False,
    )
    data = Sequences(random_sequences(LENGTHS * 3, seed=1))
    task = Engine(backbone_of()).attach(job, data)
    assert [task.sampler.batch(step) for step in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    (denominator,) = {task.participant().denominator}
    assert denominator == sum(sequence.trained_tokens for sequence in data.train[:4])


def test_packed_losses_are_those_of_the_sequences_apart() -> None:
    """reports.md 10: [1, 2, 3] and [4, 5, 6, 7, 8] in one pass, and each in a pass of its own."""
    engine = Engine(backbone_of("mistral"))
    task = attach(engine, Trial("only", [3, 5, 60]))
    packed = engine.forward({task: task.data.train})["only"].logprobs
    apart = [engine.forward({task: [example]})["only"].logprobs for example in task.data.train]
    assert packed is not None and all(apart)
    assert packed == pytest.approx([value for values in apart for value in values or ()], abs=1e-5)
