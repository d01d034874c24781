"""`--set KEY=VALUE`: the command line's word over the file's.

KEY is a run's key, a job's key (for every job), or jobs.NAME.KEY (for one job, or all that a matrix makes of it).
VALUE is YAML: `--set peft.r=16`, `--set "peft={type: lora, r: 4}"`. The last of two wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muxtune.errors import ConfigError
from muxtune.spec.aliases import canonical_job
from muxtune.spec.merge import merge_job
from muxtune.spec.scalars import nearest
from muxtune.spec.tree import Leaf, Node, Origin, Path, Table, nested, values
from muxtune.spec.yaml_tree import parse_yaml


@dataclass(frozen=True, slots=True)
class Override:
    key: str
    node: Node

    @property
    def path(self) -> Path:
        return tuple(self.key.split("."))

    @property
    def table(self) -> Table:
        return nested(self.path, self.node)

    def for_job(self, name: str | None) -> Table:
        """As a job's canonical keys: all of KEY, or what follows jobs.NAME."""
        key = self.key if name is None else self.key.removeprefix(f"jobs.{name}.")
        if key.split(".")[0] in ("name", "matrix"):
            raise ConfigError(f"{key} cannot be set", where=self.node.origin.place, hint="edit the file")
        return canonical_job(nested(tuple(key.split(".")), self.node), "" if name is None else f"jobs.{name}")


def read_overrides(sets: Sequence[str]) -> tuple[Override, ...]:
    """`KEY=VALUE` texts, read but not yet checked against any key."""
    found: list[Override] = []
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        source = f"--set {key}"
        if not equals or not all(key.split(".")):
            raise ConfigError("should be KEY=VALUE", where=f"--set {text}", hint="--set learning_rate=1e-3")
        if key.split(".")[0] == "defaults" or key == "jobs":
            raise ConfigError(f"{key} cannot be set", where=source, hint="--set KEY=VALUE sets KEY of every job")
        node = parse_yaml(value, source, lines=False)
        found.append(Override(key, Leaf(None, Origin(source)) if node is None else node))
    return tuple(found)


def job_of(override: Override, names: Iterable[str]) -> str:
    """The job that jobs.NAME.KEY means; names may hold dots, so the longest that fits."""
    rest = override.key.removeprefix("jobs.")
    known = sorted(names)
    fitting = [name for name in known if rest.startswith(f"{name}.")]
    if not fitting:
        near = nearest(rest.rpartition(".")[0], known)
        hint = f"did you mean jobs.{near}?" if near else "jobs: " + ", ".join(known[:20])
        raise ConfigError("names no job, or no key of one", where=override.node.origin.place, hint=hint)
    return max(fitting, key=len)


def overridden(job: Table, changes: Iterable[Table], varied: frozenset[Path]) -> Table:
    """A job's table under the changes, none of which may be a key that the matrix varies."""
    for change in changes:
        for path, node in values(change):
            if path in varied:
                raise ConfigError(
                    f"{'.'.join(path)} is varied by the matrix", where=node.origin.place, hint="set matrix.grid instead"
                )
        job = merge_job(job, change)
    return job
