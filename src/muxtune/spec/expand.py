"""Jobs as written to jobs as run: `--set` over each, and one job for every point of the matrix.

The matrix is applied over `--set`, which may not touch what it varies: a job's name must not lie about its values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from muxtune.errors import ConfigError
from muxtune.spec.drafts import Draft
from muxtune.spec.matrix import MAX_POINTS, Point
from muxtune.spec.merge import merge_job
from muxtune.spec.names import first_repeated, read_name
from muxtune.spec.overrides import Override, job_of, overridden
from muxtune.spec.tree import Table


@dataclass(frozen=True, slots=True)
class _Member:
    """A job to be: as written, or at one point of the matrix."""

    draft: Draft
    base: Draft
    point: Point | None = None


@dataclass(frozen=True, slots=True)
class _Changes:
    """`--set`s as canonical keys: those for every job, and those for one by its name."""

    shared: list[Table] = field(default_factory=list)
    own: dict[str, list[Table]] = field(default_factory=dict)


def expanded(drafts: Sequence[Draft], points: Sequence[Point], sets: Sequence[Override]) -> list[Draft]:
    """Every job of the run, in the order of the file, then of the matrix."""
    if len(drafts) * len(points) > MAX_POINTS:
        raise ConfigError(f"{len(drafts)} jobs at {len(points)} points are more than {MAX_POINTS}", where="matrix")
    members = [member for draft in drafts for member in _members(draft, points)]
    _check_unique([member.draft for member in members])
    changes = _changes(sets, {name for member in members for name in (member.base.name, member.draft.name)})
    return [_changed(member, changes) for member in members]


def _members(draft: Draft, points: Sequence[Point]) -> list[_Member]:
    if not points or not draft.sweeps:
        return [_Member(draft, draft)]
    members: list[_Member] = []
    for point in points:
        name = f"{draft.name}-{point.suffix}"
        origin = point.settings[0][1].origin
        try:
            read_name(name)
        except ConfigError as error:
            raise ConfigError(error.message, where=origin.at(draft.at), hint=error.hint) from None
        members.append(_Member(replace(draft, name=name, at=f"jobs.{name}", name_origin=origin), draft, point))
    return members


def _check_unique(drafts: Sequence[Draft]) -> None:
    repeated = first_repeated(draft.name for draft in drafts)
    if repeated is not None:
        second = next(draft for draft in reversed(drafts) if draft.name == repeated)
        message = f"two jobs would be named {repeated!r} (case does not count)"
        raise ConfigError(message, where=second.name_origin.at("matrix"), hint="a value may be listed twice")


def _changes(sets: Sequence[Override], names: Collection[str]) -> _Changes:
    changes = _Changes()
    for override in sets:
        if override.path[0] == "jobs":
            name = job_of(override, names)
            changes.own.setdefault(name, []).append(override.for_job(name))
        else:
            changes.shared.append(override.for_job(None))
    return changes


def _changed(member: _Member, changes: _Changes) -> Draft:
    base, draft, point = member.base, member.draft, member.point
    mine = [*changes.shared, *changes.own.get(base.name, ())]
    if point is None:
        table = overridden(base.table, mine, frozenset())
    else:
        mine += changes.own.get(draft.name, ())
        table = merge_job(overridden(base.table, mine, point.paths), point.overrides)
    return replace(draft, table=replace(table, origin=base.table.origin))
