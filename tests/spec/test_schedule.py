"""Steps and learning rates equal transformers' for the same names, bit for bit."""

from __future__ import annotations

import pytest

from muxtune.spec import JobSpec, lr_at, steps_per_epoch, total_steps, warmup_steps
from muxtune.spec.schedule import evaluations

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def job(**keys: object) -> JobSpec:
    return JobSpec(name="a", datasets=("a",), **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [1, 7, 24])
@pytest.mark.parametrize("warmup", [0, 1, 3, 0.3, 24, 40])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
def test_learning_rates(kind: str, warmup: float, total: int) -> None:
    spec = job(lr_scheduler_type=kind, warmup_steps=0 if kind == "constant" else warmup, learning_rate=3e-3)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=3e-3)
    steps = transformers.TrainingArguments(output_dir="x", warmup_steps=spec.warmup_steps).get_warmup_steps(total)
    assert warmup_steps(spec, total) == steps
    theirs = transformers.get_scheduler(kind, optimizer, num_warmup_steps=steps, num_training_steps=total)
    for step in range(total + 3):
        assert lr_at(spec, step, total) == theirs.get_last_lr()[0], step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("done", [0, 1, 5, 7, 8])
@pytest.mark.parametrize(("every", "groups"), [(None, 3), (None, 8), (1, 3), (3, 3), (9, 3)])
def test_evaluations_are_counted_as_they_fall_due(every: int | None, groups: int, done: int) -> None:
    spec = job(max_steps=8, eval_steps=every, val_set_size=1)
    due = every or steps_per_epoch(spec, groups)
    counted = sum(step % due == 0 or step == 8 for step in range(done + 1, 9))
    assert evaluations(spec, groups, done) == counted


def test_totals() -> None:
    batched = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert steps_per_epoch(job(**batched), 9) == 3
    assert total_steps(job(**batched), 9) == 9
    assert total_steps(job(num_train_epochs=0.5, **batched), 9) == 2
    assert total_steps(job(num_train_epochs=2, max_steps=5, **batched), 9) == 5
    assert total_steps(job(num_train_epochs=0.01), 1) == 1
