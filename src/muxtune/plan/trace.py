"""The trace of a run: its `RoundRecord`s as lines of JSON, in the schedule's own vocabulary.

A line is one executed schedule: what it said and what ran when, times in seconds since that round began - or a plan,
which was in force for the rounds after it. Fields that have their default are left out, and numbers that are not finite
are null. Log-probabilities are not kept: one number a token would make the trace larger than the data.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from muxtune.plan.types import (
    Action,
    ActionRecord,
    HTask,
    ItemOutcome,
    LossSpec,
    MicroBatch,
    OptimStep,
    PairSums,
    Plan,
    RoundRecord,
    RoundSchedule,
    SequenceRef,
    StepOutcome,
    WorkItem,
)


def to_line(written: RoundRecord | Plan) -> str:
    """One line, its end included."""
    plain = {"plan": _plain(written)} if isinstance(written, Plan) else _plain(written)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False) + "\n"


def from_line(line: str) -> RoundRecord | Plan:
    """What `to_line` wrote, but for log-probabilities. Raises ValueError for anything else."""
    try:
        found = json.loads(line)
        return _plan(found["plan"]) if "plan" in found else _record(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"neither the record of a round nor a plan: {error}") from None


def schedule_line(schedule: RoundSchedule) -> str:
    """A schedule alone, as a line."""
    return json.dumps(_plain(schedule), separators=(",", ":"), allow_nan=False)


def schedule_from(line: str) -> RoundSchedule:
    """What `schedule_line` wrote. Raises ValueError for anything else."""
    try:
        return _schedule(json.loads(line))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no schedule: {error}") from None


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(own)
            for field in dataclasses.fields(value)
            if field.name != "logprobs" and (own := getattr(value, field.name)) != field.default
        }
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record(found: Mapping[str, Any]) -> RoundRecord:
    return RoundRecord(
        _schedule(found["schedule"]), tuple(map(_action_record, found.get("actions", ()))), found["wall_s"]
    )


def _schedule(found: Mapping[str, Any]) -> RoundSchedule:
    return RoundSchedule(found["round"], tuple(map(_action, found["actions"])))


def _plan(found: Mapping[str, Any]) -> Plan:
    htasks = tuple(HTask(**{**one, "tasks": tuple(one["tasks"])}) for one in found["htasks"])
    return Plan(**{**found, "htasks": htasks, "buckets": tuple(map(tuple, found["buckets"]))})


def _action(found: Mapping[str, Any]) -> Action:
    if "items" not in found:
        return OptimStep(**found)
    items = tuple(
        WorkItem(
            item.get("task"),
            item["kind"],
            item["source"],
            tuple(SequenceRef(**ref) for ref in item["sequences"]),
            LossSpec(**item["loss"]) if "loss" in item else None,
        )
        for item in found["items"]
    )
    return MicroBatch(**{**found, "items": items})


def _action_record(found: Mapping[str, Any]) -> ActionRecord:
    items = tuple(_outcome(item) for item in found.get("items", ()))
    step = found.get("step")
    return ActionRecord(**{**found, "items": items, "step": StepOutcome(**_measured(step)) if step else None})


def _outcome(found: Mapping[str, Any]) -> ItemOutcome:
    return ItemOutcome(**{"task": None, **_measured(found)})


def _measured(found: Mapping[str, Any]) -> dict[str, Any]:
    """With what was not a number one again, and pairs as they were."""
    made = {key: math.nan if value is None and key != "task" else value for key, value in found.items()}
    if isinstance(pairs := found.get("pairs"), dict):
        rewards = {key: math.nan if value is None else value for key, value in pairs.items() if key != "pairs"}
        made["pairs"] = PairSums(pairs.get("pairs", 0), **rewards)
    return made
