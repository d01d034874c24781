"""What ran, as a timeline: the records of some rounds, laid end to end, each task in a lane of its own.

The first lane is the device, whose idle time between passes is drawn. Colours are those of the hTasks that the schedule
of each round names, so a plan and what became of it look alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muxtune.cli.chart import Block, Chart, Kind, seconds_text
from muxtune.plan.types import Action, ActionRecord, MicroBatch, RoundRecord

DEVICE = "device"
_KINDS: Mapping[str, Kind] = {"train": "pass", "carry": "carry", "score": "carry", "eval": "eval", "reference": "eval"}


def measured_chart(records: Sequence[RoundRecord], tasks: Sequence[str], title: str) -> Chart:
    """The rounds of `records`; tasks that are not among `tasks` get no lane."""
    lanes = {name: lane for lane, name in enumerate(tasks, 1)}
    blocks: list[Block] = []
    began_s = 0.0
    for record in records:
        for done in record.actions:
            blocks += _blocks(record.schedule.actions[done.action], done, began_s, lanes)
        began_s += record.wall_s
    return Chart(title, (DEVICE, *tasks), tuple(blocks), began_s, frozenset({0}))


def _blocks(action: Action, done: ActionRecord, began_s: float, lanes: Mapping[str, int]) -> Iterator[Block]:
    start_s, end_s = began_s + done.start_s, began_s + done.end_s
    took = seconds_text(done.end_s - done.start_s)
    if not isinstance(action, MicroBatch):
        told = f"optimizer step of {action.task}: {took}"
        for lane in {0, lanes.get(action.task, 0)}:
            yield Block(lane, start_s, end_s, "step", 0, "", told)
        return
    names = [item.task or "the bare base model" for item in action.items]
    kind, label, ran = _KINDS.get(action.items[0].kind, "pass"), str(done.rows), f"{done.rows} rows"
    if action.resumes:  # its forward pass was another one's, which has the rows
        kind, label, ran = "backward", str(action.tokens), "the way back of what was kept"
    told = f"{', '.join(names)}: {ran}, {action.tokens} tokens, {took}"
    yield Block(0, start_s, end_s, kind, action.htask, label, told)
    for item in action.items:
        if item.task is not None and item.task in lanes:
            own = f"{item.task}: {item.tokens} tokens of {ran}, {took}"
            yield Block(lanes[item.task], start_s, end_s, kind, action.htask, str(item.tokens), own)


def train_rounds(records: Sequence[RoundRecord], tasks: Sequence[str], most: int) -> list[RoundRecord]:
    """The last `most` rounds in which most of these tasks took a step: what a plan of all of them is compared with."""
    counts = [sum(done.step is not None and done.step.task in tasks for done in one.actions) for one in records]
    full = max(counts, default=0)
    chosen = [one for one, count in zip(records, counts, strict=True) if full and count == full]
    return chosen[-most:]
