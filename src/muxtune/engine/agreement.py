"""All ranks came to the same, or the run is over: one small exchange after everything that they do together.

What raises on all ranks at the same place - an adapter that cannot be built, a job whose pass is at fault - leaves
them where one device would be, and is dealt with as it is there. What raises on one rank alone - its memory, its disk,
its files - leaves the others waiting for it in the middle of a pass. That rank waits for them for a moment, in case
they raise as well, and then ends: its closed connections end the others at once, and each says whose fault it was.
"""

from __future__ import annotations

import zlib

from muxtune.engine.failure import PassError, brief
from muxtune.engine.followers import Outcome
from muxtune.errors import MuxTuneError, RankError
from muxtune.parallel.channel import Channel, Message

GRACE_S = 10.0  # for the others to raise, too: they are at most a pass behind
_CLIP = 250  # characters of a message that travels


def agree(channel: Channel, outcome: Outcome, error: Exception | None) -> None:
    """Raises RankError, on all ranks, where one came to something else than the others. `error`: what it raised."""
    own = _answer(outcome, error)
    try:
        answers = channel.exchange(own, within_s=None if error is None else GRACE_S)
    except RankError as lost:
        if error is None:
            raise
        raise _alone(channel.rank, own) from lost
    if len({(one["ran"], one["steps"]) for one in answers}) == 1:
        return
    raised = [(one["ran"], rank) for rank, one in enumerate(answers) if one["ran"] is not None]
    if not raised:
        raise RankError(
            "the ranks have come to different results, which must not be",
            hint=f"see that all run the same version on the same kind of machine; then {RankError.again}",
        )
    _, first = min(raised)
    raise _alone(first, answers[first])


def _answer(outcome: Outcome, error: Exception | None) -> Message:
    """`ran`: None where all ran, else how many actions had before it raised, or -1. `steps`: what steps came to."""
    if error is not None:
        ran = len(error.record.actions) if isinstance(error, PassError) else -1
        cause = error.__cause__ if isinstance(error, PassError) and error.__cause__ is not None else error
        told = str(cause) if isinstance(cause, MuxTuneError) else brief(cause)
        return {"ran": ran, "steps": 0, "why": told[:_CLIP]}
    steps = [one.step for one in outcome.record.actions if one.step] if outcome.record is not None else []
    came_to = [(step.task, step.step, step.error is None) for step in steps]
    return {"ran": None, "steps": zlib.crc32(repr(came_to).encode())}


def _alone(rank: int, answer: Message) -> RankError:
    return RankError(f"failed alone: {answer['why']}", rank=rank, hint=f"mend that, then {RankError.again}")
