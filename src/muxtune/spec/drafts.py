"""The jobs that a config file writes down, before `--set`, matrix and validation.

A file either lists `jobs`, each over `defaults`, or is one job written flat beside the run's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath

from muxtune.errors import ConfigError
from muxtune.spec.aliases import canonical_job, is_job_key, is_refused_key, job_key_names
from muxtune.spec.border import unknown_key
from muxtune.spec.merge import merge_job
from muxtune.spec.names import first_repeated, read_name
from muxtune.spec.run import RunSpec
from muxtune.spec.scalars import read_flag
from muxtune.spec.tree import Leaf, Node, Origin, Table, as_items, as_table, is_null, noted

RUN_KEYS = tuple(key for key in RunSpec.model_fields if key != "jobs")
_TOP_KEYS = (*RUN_KEYS, "defaults", "jobs", "matrix")


@dataclass(frozen=True, slots=True)
class Draft:
    """A job on its way from a table to a spec. `at` is its place in errors: `jobs.sql`, or nothing in a flat file."""

    name: str
    table: Table  # canonical keys; `name` and `matrix` taken out
    at: str
    sweeps: bool  # the run's matrix applies
    name_origin: Origin
    flat: bool = False  # written beside the run's keys


def read_drafts(top: Table, source: str, *, swept: bool) -> tuple[Draft, ...]:
    """The jobs of a file in its order. `top` is the whole file; `swept` says whether it has a matrix."""
    if "jobs" not in top.entries:
        return (_flat_job(top, source),)
    for key, node in top.entries.items():
        if key in _TOP_KEYS:
            continue
        if is_job_key(key):
            raise ConfigError("is a job's key", where=node.origin.at(key), hint="write it under defaults or in a job")
        raise unknown_key(key, _TOP_KEYS, where=node.origin.place)
    below = _defaults(as_table(top.get("defaults"), "defaults"))
    jobs = as_items(top.get("jobs"), "jobs")
    if not jobs.nodes:
        raise ConfigError("holds no job", where=jobs.origin.at("jobs"))
    drafts = tuple(_listed_job(node, below, f"jobs.{index}", swept) for index, node in enumerate(jobs.nodes))
    _check_unique(drafts)
    return drafts


def _check_unique(drafts: tuple[Draft, ...]) -> None:
    repeated = first_repeated(draft.name for draft in drafts)
    if repeated is not None:
        second = next(draft for draft in reversed(drafts) if draft.name == repeated)
        message = f"two jobs are named {repeated!r} (case does not count)"
        raise ConfigError(message, where=second.name_origin.at("jobs"))


def _defaults(table: Table) -> Table:
    for key in ("name", "matrix"):
        if (node := table.get(key)) is not None:
            raise ConfigError("belongs to a job", where=node.origin.at("defaults", key))
    return canonical_job(as_table(noted(table, "defaults"), "defaults"), "defaults")


def _flat_job(top: Table, source: str) -> Draft:
    if (defaults := top.get("defaults")) is not None:
        hint = "write them at the top of the file, or list jobs"
        raise ConfigError("there are no jobs to have defaults", where=defaults.origin.at("defaults"), hint=hint)
    for key, node in top.entries.items():
        if key not in _TOP_KEYS and not is_job_key(key) and not is_refused_key(key):
            raise unknown_key(key, (*_TOP_KEYS, "datasets", "peft"), also=job_key_names(), where=node.origin.place)
    stem = Leaf(PurePath(source).stem, Origin(source).noted("the file's name"))
    name, origin = _name(top.get("name") or stem, "name")
    table = canonical_job(top.without(*_TOP_KEYS, "name"), "")
    return Draft(name, table, "", sweeps=True, name_origin=origin, flat=True)


def _listed_job(node: Node, below: Table, at: str, swept: bool) -> Draft:
    if is_null(node) or not isinstance(node, Table):
        raise ConfigError("should be a mapping of a job's keys", where=node.origin.at(at))
    given = node.get("name")
    if given is None:
        raise ConfigError("has no name", where=node.origin.at(at), hint="name: the folder its adapter is saved in")
    name, origin = _name(given, f"{at}.name")
    at = f"jobs.{name}"
    above = canonical_job(node.without("name", "matrix"), at)
    table = replace(merge_job(below, above), origin=node.origin)
    return Draft(name, table, at, sweeps=_sweeps(node.get("matrix"), at, swept), name_origin=origin)


def _name(node: Node, at: str) -> tuple[str, Origin]:
    try:
        return read_name(node.text if isinstance(node, Leaf) else None), node.origin
    except ConfigError as error:
        raise ConfigError(error.message, where=node.origin.at(at), hint=error.hint) from None


def _sweeps(node: Node | None, at: str, swept: bool) -> bool:
    if node is None or is_null(node):
        return True
    if not isinstance(node, Leaf):
        hint = "matrix belongs to the top of the file; a job may say matrix: false"
        raise ConfigError("a job has no matrix of its own", where=node.origin.at(at, "matrix"), hint=hint)
    try:
        sweeps = read_flag(node.text)
    except ConfigError as error:
        raise ConfigError(error.message, where=node.origin.at(at, "matrix")) from None
    if sweeps and not swept:
        hint = "matrix: {grid: {learning_rate: [1e-4, 2e-4]}} at the top of the file, or leave it out"
        raise ConfigError("there is no matrix to be in", where=node.origin.at(at, "matrix"), hint=hint)
    return sweeps
