"""How long a dry run's jobs would take: as their plan predicts it, where what operators cost here has been measured.

    whole = the last step of the last job (`muxtune.plan.outlook`) + passes that only go forward: evaluations, and the
            bare backbone's, which dpo compares with

Sampling and saving are in no prediction. Where jobs wait for memory, several ranks hold the model, or nothing has been
measured, there is none: the caller has a rougher estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from muxtune.data.prepare import PreparedJob
from muxtune.engine.admission import Admission
from muxtune.engine.forecast import forecast_of
from muxtune.engine.training import TrainingRun
from muxtune.models.sources import ModelFolder
from muxtune.plan.cost import CostModel
from muxtune.plan.outlook import Outlooks, cost_on
from muxtune.spec.cluster import ClusterSpec
from muxtune.spec.schedule import evaluations, total_steps


def predicted_s(
    training: TrainingRun,
    base: ModelFolder,
    prepared: Sequence[PreparedJob],
    admission: Admission,
    done: Mapping[str, int],
) -> float | None:
    """Seconds of all `prepared` jobs that are in `done`, from as many steps on; None where nothing is known."""
    begun = [one for one in prepared if one.job.name in done]
    known = begun and not admission.waiting and training.layout.size == 1
    table = training.known_table(base, admission.model.block) if known else None
    if table is None:
        return None
    found = forecast_of(begun, admission, table, done)
    cluster = ClusterSpec()
    cost = cost_on(table, cluster, recompute=found.recompute)
    outlook = Outlooks(found.loads, cost, found.memory, cluster, most_rows=found.most_rows).of(training.run.policy)
    beside = sum(
        _references_s(one, done[one.job.name], cost, found.most_rows)
        + _evaluations_s(one, done[one.job.name], cost, found.most_rows)
        for one in begun
    )
    return max(outlook.done_s.values()) + beside


def _references_s(prepared: PreparedJob, done: int, cost: CostModel, rows: int) -> float:
    """Of the bare backbone on each sequence of dpo once, at most, in passes of so many rows."""
    job, report = prepared.job, prepared.data.report
    if job.method != "dpo":
        return 0.0
    left = (total_steps(job, prepared.data.groups) - done) * job.effective_batch / prepared.data.groups
    return min(1.0, left) * _forward_s(report.train_tokens, report.trained_tokens, cost, rows)


def _evaluations_s(prepared: PreparedJob, done: int, cost: CostModel, rows: int) -> float:
    """Of what is held out, as often as it is evaluated; adapters, which cost little going forward, not counted."""
    held_out = prepared.data.validation
    if not held_out:
        return 0.0
    tokens, trained = sum(one.input_tokens for one in held_out), sum(int(one.mask[1:].sum()) for one in held_out)
    return evaluations(prepared.job, prepared.data.groups, done) * _forward_s(tokens, trained, cost, rows)


def _forward_s(tokens: int, trained: int, cost: CostModel, rows: int) -> float:
    """Of the backbone and the head, in passes of so many rows."""
    passes = max(1.0, tokens / rows)
    own = cost.shared_s(np.asarray(tokens / passes), np.asarray(trained / passes), trains=False)
    return passes * float(own)
