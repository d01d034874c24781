"""Buckets: hTasks in groups of near-equal time.

The longest first, each into the bucket that has least so far (LPT): the fullest bucket is within 4/3 - 1/(3 P) of the
least that any partition into P buckets has (Graham 1969). Moves and swaps that relieve the fullest bucket follow while
there are any, so the bound holds and is rarely met. Deterministic: ties go by order, and times alone decide.

The boundary: seconds in, places out. Cost: K log K + K P, and at most K P + K^2 comparisons an improvement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def group(seconds: Sequence[float], buckets: int) -> tuple[tuple[int, ...], ...]:
    """A partition of the places of `seconds` (of an iteration of each hTask, not negative) into so many buckets, none
    of them empty; members ascend, and so do the buckets by their first."""
    assert 1 <= buckets <= len(seconds), (buckets, len(seconds))
    members: list[list[int]] = [[] for _ in range(buckets)]
    loads = [0.0] * buckets
    for place in sorted(range(len(seconds)), key=lambda place: -seconds[place]):
        # Counts break ties, so that no bucket stays empty where hTasks take no time.
        least = min(range(buckets), key=lambda bucket: (loads[bucket], len(members[bucket])))
        members[least].append(place)
        loads[least] += seconds[place]
    for _ in seconds:  # a bound on the improvements; there are hardly ever more than a few
        if not _relieve(members, seconds):
            break
    return tuple(sorted(tuple(sorted(bucket)) for bucket in members))


def _relieve(members: list[list[int]], seconds: Sequence[float]) -> bool:
    """Make the best change that leaves both its buckets with less than the fullest has; whether there was one."""
    loads = [sum(seconds[place] for place in bucket) for bucket in members]
    fullest = max(range(len(members)), key=loads.__getitem__)
    best, found = loads[fullest], None
    for other in range(len(members)):
        for out, back in _changes(members[fullest], members[other]) if other != fullest else ():
            moved = seconds[out] - (seconds[back] if back is not None else 0.0)
            worse = max(loads[fullest] - moved, loads[other] + moved)
            if worse < best * (1 - 1e-12):
                best, found = worse, (other, out, back)
    if found is None:
        return False
    other, out, back = found
    members[fullest].remove(out)
    members[other].append(out)
    if back is not None:
        members[other].remove(back)
        members[fullest].append(back)
    return True


def _changes(full: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """What could leave the one bucket, and what come back for it."""
    for out in full:
        if len(full) > 1:
            yield out, None
        for back in other:
            yield out, back
