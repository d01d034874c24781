"""Whether a job in the config may continue the training that a job of its name began.

Resuming must give what an undisturbed run of the *new* job would have given. So a key may differ only where the steps
already done would not have differed:

- what only watches or stores (FREE): saving, evaluation, logging, samples;
- the split of the effective batch, of which only the product has meaning; the order of target modules;
- max_steps or num_train_epochs, growing, under a constant schedule: every other schedule's past depends on its end.

Everything else is refused. A data set's path counts as its content unless the caller, who can hash, says `same_data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from muxtune.errors import ConfigError
from muxtune.spec.job import JobSpec

FREE = frozenset(
    ("save_steps", "save_total_limit", "logging_steps", "report_to", "sample_prompts", "validation", "eval_steps")
)


class Change(NamedTuple):
    key: str  # dotted
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def changed_keys(old: JobSpec, new: JobSpec) -> list[Change]:
    """Every key whose value differs, in the order of the spec."""
    was, now = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    return [Change(key, was.get(key), now.get(key)) for key in {**was, **now} if was.get(key) != now.get(key)]


def resume_allowed(old: JobSpec, new: JobSpec, *, same_data: bool = False) -> bool:
    """Whether `new` may continue what `old` began."""
    return not _blocking(old, new, same_data)


def check_resume(old: JobSpec, new: JobSpec, *, same_data: bool = False) -> None:
    """Raises ConfigError, showing the difference, where `new` may not continue `old`."""
    blocking = _blocking(old, new, same_data)
    if blocking:
        listed = "; ".join(str(change) for change in blocking)
        raise ConfigError(
            f"the job has changed since its training began: {listed}",
            where=f"jobs.{new.name}",
            hint="undo the change, give the job another name, or start over with --overwrite; "
            "only max_steps or num_train_epochs may grow, under a constant schedule",
        )


def _blocking(old: JobSpec, new: JobSpec, same_data: bool) -> list[Change]:
    changes = [change for change in changed_keys(old, new) if change.key.split(".")[0] not in FREE]
    return [change for change in changes if not _harmless(change, old, new, same_data)]


def _harmless(change: Change, old: JobSpec, new: JobSpec, same_data: bool) -> bool:
    match change.key:
        case "per_device_train_batch_size" | "gradient_accumulation_steps":
            return old.effective_batch == new.effective_batch
        case "peft.target_modules":
            return _as_set(change.old) == _as_set(change.new)
        case "datasets":
            same = [(d.type, d.weight) for d in old.datasets] == [(d.type, d.weight) for d in new.datasets]
            return same_data and same
        case "max_steps":
            return _ends_may_move(new) and _grows(old.max_steps, new.max_steps)
        case "num_train_epochs":
            without_effect = old.max_steps is not None and new.max_steps is not None
            return without_effect or (_ends_may_move(new) and _grows(old.num_train_epochs, new.num_train_epochs))
    return False


def _ends_may_move(job: JobSpec) -> bool:
    """Whether no step's learning rate depends on how many there are: a fractional warmup does."""
    constant = job.lr_scheduler_type in ("constant", "constant_with_warmup")
    return constant and (job.warmup_steps == 0 or job.warmup_steps >= 1)


def _as_set(targets: object) -> frozenset[object]:
    return frozenset(targets if isinstance(targets, tuple) else (targets,))


def _grows(old: float | None, new: float | None) -> bool:
    return old is not None and new is not None and new >= old


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
