"""Who starts beside whom: in order, never beyond the limit, and nobody later for those who come after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from muxtune.engine.engine import DEFAULT_FUSE_TOKENS
from muxtune.engine.room import Room, starting
from muxtune.models.memory import Footprint

LIMIT = 100


@dataclass(frozen=True, slots=True)
class Job:
    """So many bytes for so many rounds."""

    name: int
    held_bytes: int
    activation_bytes: int
    rounds: int
    longest: int = 1
    widest: int = 1


ROOM = Room(Footprint(0, 1, 0, 0, 0, 0, ()), LIMIT, 0)
jobs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 9)).map(lambda job: Job(0, *job)), max_size=9
).map(lambda made: [replace(job, name=number) for number, job in enumerate(made)])


def starts(line: Sequence[Job]) -> dict[int, int]:
    """The round at which each starts, where each takes a step a round and places are given away as soon as they are
    free."""
    running: list[Job] = []
    waiting, found, now = list(line), dict[int, int](), 0
    while running or waiting:
        taken = starting(running, waiting, ROOM.fits)
        assert taken == [job for job in waiting if job in taken], "in their order"
        assert taken or running, "the next in line starts where nobody runs"
        running += taken
        assert ROOM.fits(running)
        waiting = [job for job in waiting if job not in taken]
        found |= dict.fromkeys((job.name for job in taken), now)
        passed = min(job.rounds for job in running)
        now += passed
        running = [replace(job, rounds=job.rounds - passed) for job in running]
        running = [job for job in running if job.rounds]
    return found


@given(jobs)
def test_everyone_starts_once_and_the_next_in_line_as_if_nobody_came_after(line: list[Job]) -> None:
    found = starts(line)
    assert sorted(found) == [job.name for job in line]
    at_once = starting([], line, ROOM.fits)
    late = [job for job in line if job not in at_once]
    if late:
        first = line.index(late[0])
        assert starts(line[: first + 1])[late[0].name] == found[late[0].name]


@given(jobs)
def test_a_place_that_someone_could_use_at_no_ones_cost_is_not_left_empty(line: list[Job]) -> None:
    """Who fits, and has ended before anybody else has, is never kept waiting."""
    taken = starting([], line, ROOM.fits)
    others = [job for job in line if job not in taken]
    soonest = min((job.rounds for job in taken), default=0)
    assert not [job for job in others if job.rounds <= soonest and ROOM.fits([*taken, job])]


def test_a_smaller_later_one_goes_first_only_where_that_delays_nobody() -> None:
    running = [Job(0, 60, 0, 10), Job(1, 20, 0, 30)]
    large = Job(2, 70, 0, 5)  # fits after 10 rounds, beside 10 bytes more
    short, long, slim = Job(3, 20, 0, 10), Job(4, 20, 0, 11), Job(5, 10, 0, 99)
    for later, goes in ((short, True), (long, False), (slim, True)):
        assert (starting(running, [large, later], ROOM.fits) == [later]) is goes, later
    assert starting(running, [large, slim, slim, short], ROOM.fits) == [slim], "the second slim one would be in the way"
    assert starting(running[1:], [large, slim], ROOM.fits) == [large, slim]


def test_the_widest_batch_of_any_has_to_fit_beside_all() -> None:
    assert ROOM.fits([Job(0, 30, 20, 1), Job(1, 30, 40, 1)]) and not ROOM.fits([Job(0, 30, 20, 1), Job(1, 30, 41, 1)])
    assert ROOM.left_bytes([Job(0, 30, 20, 1)]) == 70
    assert ROOM.fuse_tokens([Job(0, 30, 20, 1, widest=20)]) == 70 and ROOM.fuse_tokens([]) == 0
    assert ROOM.peak_bytes([]) == 0 and ROOM.peak_bytes([Job(0, 30, 20, 1, widest=20)]) == 50
    assert replace(ROOM, limit_bytes=10**6).fuse_tokens([Job(0, 30, 20, 1)]) == DEFAULT_FUSE_TOKENS
