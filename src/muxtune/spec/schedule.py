"""How many steps a job takes and the learning rate of each: pure functions of the job and the size of its data.

The formulas are those of transformers' `get_scheduler` with its defaults, so a run here and a run there step alike;
the tests hold the two together, bit for bit in fp64.
"""

from __future__ import annotations

import math

from muxtune.spec.job import JobSpec


def total_steps(job: JobSpec, groups: int) -> int:
    """Optimizer steps of the whole training on `groups` groups of examples (an sft example is a group)."""
    if job.max_steps is not None:
        return job.max_steps
    return max(1, math.ceil(job.num_train_epochs * steps_per_epoch(job, groups)))


def steps_per_epoch(job: JobSpec, groups: int) -> int:
    """The last batch of an epoch may be smaller."""
    return max(1, math.ceil(groups / job.effective_batch))


def evaluations(job: JobSpec, groups: int, done: int = 0) -> int:
    """How many there are after `done` steps, where something is held out: every `eval_steps` steps (or epoch), and
    after the last."""
    total, every = total_steps(job, groups), job.eval_every or steps_per_epoch(job, groups)
    return -(-total // every) - done // every if done < total else 0


def warmup_steps(job: JobSpec, total: int) -> int:
    """`warmup_steps` as steps: a fraction is of all `total` steps, rounded up."""
    return int(job.warmup_steps) if job.warmup_steps >= 1 else math.ceil(total * job.warmup_steps)


def lr_at(job: JobSpec, step: int, total_steps: int) -> float:
    """The learning rate of the optimizer step taken after `step` steps are done (0 for the first)."""
    return job.learning_rate * _factor(job, step, total_steps)


def _factor(job: JobSpec, step: int, total: int) -> float:
    kind, warmup = job.lr_scheduler_type, warmup_steps(job, total)
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "inverse_sqrt":
        timescale = warmup or 10_000
        return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
    if kind == "linear":
        return max(0.0, (total - step) / max(1, total - warmup))
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
