"""A YAML file and `--set`s to a RunSpec whose every value knows its origin.

    file -> tree -> run's keys, jobs over their defaults under our keys (drafts.py)
         -> --set -> one job a point of the matrix -> data paths -> JobSpec -> RunSpec

A fault is a ConfigError whose `where` is the file, the line and the key: `three.yaml:12 jobs.sql.learning_rate`.
Paths of data are joined to the config file's folder, output_dir and base_model stay as written. A null gives a key its
default again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from muxtune.errors import ConfigError, MuxTuneError
from muxtune.spec.aliases import canonical_run, is_run_alias
from muxtune.spec.border import Spec
from muxtune.spec.drafts import RUN_KEYS, Draft, read_drafts
from muxtune.spec.expand import expanded
from muxtune.spec.job import JobSpec
from muxtune.spec.matrix import read_matrix
from muxtune.spec.merge import merge, without_nulls
from muxtune.spec.overrides import Override, read_overrides
from muxtune.spec.paths import with_data_paths
from muxtune.spec.peft import short_setting
from muxtune.spec.run import RunSpec
from muxtune.spec.tree import Leaf, Origin, Table, origin_at, plain, way_to
from muxtune.spec.yaml_tree import read_yaml

_S = TypeVar("_S", bound=Spec)


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run, and what was given for it: the run's keys and `jobs`, by name, as a tree that knows its origins."""

    run: RunSpec
    given: Table

    def origin(self, *path: str) -> Origin:
        """Where the value at a path of `run` came from; jobs go by name: origin("jobs", "sql", "peft", "r")."""
        return origin_at(self.given, path)

    def locate(self, error: MuxTuneError) -> None:
        """Add file and line to an error that names a job's key (`jobs.sql.peft.r`), where the key was given."""
        names = [job.name for job in self.run.jobs if f"{error.where}.".startswith(f"jobs.{job.name}.")]
        if error.where is not None and names:
            name = max(names, key=len)  # a name may have dots
            rest = error.where.removeprefix(f"jobs.{name}").strip(".")
            path = ("jobs", name, *(rest.split(".") if rest else ()))
            *_, nearest_given = way_to(self.given, path)
            error.where = nearest_given.origin.at(error.where)


def load_run(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> ResolvedRun:
    """The run that a file and `KEY=VALUE`s over it describe. Raises ConfigError."""
    source = os.fspath(path)
    overrides = read_overrides(sets)
    top = canonical_run(read_yaml(source))
    for override in overrides:
        if _sets_run(override):
            top = merge(top, canonical_run(override.table))
    points = read_matrix(top.get("matrix"))
    drafts = expanded(
        read_drafts(top, source, swept=bool(points)),
        points,
        [override for override in overrides if not _sets_run(override)],
    )
    tables = {draft.name: _finished(draft, os.path.dirname(source)) for draft in drafts}
    _check_any_job(drafts, tables)
    jobs = tuple(validated(JobSpec, tables[draft.name], draft.at) for draft in drafts)
    table = without_nulls(Table({key: node for key, node in top.entries.items() if key in RUN_KEYS}, top.origin))
    run = validated(RunSpec, replace(table, origin=Origin(source)), "", jobs=jobs)
    return ResolvedRun(run, merge(table, Table({"jobs": Table(dict(tables))})))


def _sets_run(override: Override) -> bool:
    key = override.path[0]
    return key in RUN_KEYS or key == "matrix" or is_run_alias(key)


def _check_any_job(drafts: Sequence[Draft], tables: dict[str, Table]) -> None:
    """Raises ConfigError for a file that neither lists jobs nor is one."""
    flat = next((draft for draft in drafts if draft.flat), None)
    if flat is not None and "datasets" not in tables[flat.name].entries:
        raise ConfigError(
            "there are neither jobs nor the datasets of a single one",
            where=flat.table.origin.at("jobs"),
            hint="jobs: [{name: a, datasets: [a.jsonl]}], or datasets beside base_model",
        )


def _finished(draft: Draft, folder: str) -> Table:
    table = _with_short_name(with_data_paths(without_nulls(draft.table), folder, draft.at))
    return replace(table, entries={"name": Leaf(draft.name, draft.name_origin), **table.entries})


def _with_short_name(table: Table) -> Table:
    """A job whose `peft.type` is a short name, with what that name sets written out: its origin is the name's."""
    peft = table.get("peft")
    name = peft.get("type") if isinstance(peft, Table) else None
    setting = short_setting(name.text) if isinstance(name, Leaf) and name.text is not None else None
    if setting is None:
        return table
    assert isinstance(peft, Table) and isinstance(name, Leaf)
    key, text = setting
    meant = Leaf(text, name.origin.noted(f"type {name.text}"))
    peft = replace(peft, entries={key: meant, **peft.entries})
    return replace(table, entries={**table.entries, "peft": peft})


def validated(cls: type[_S], table: Table, at: str, **extra: object) -> _S:
    """The spec that a table describes; `at` is the table's place in errors. Raises ConfigError, with file and line."""
    values = plain(table)
    assert isinstance(values, dict)
    try:
        return cls(**values, **extra)
    except ConfigError as error:
        place = _place(table, error.where, at)
        raise ConfigError(error.message, where=place, hint=error.hint) from None


def _place(table: Table, key: str | None, at: str) -> str:
    """The place of the deepest node that was given on the way to `key`."""
    *_, nearest_given = way_to(table, tuple((key or "").split(".")))
    return nearest_given.origin.at(at, key or "")
