"""What a trained adapter says about its origin: the values in `training_manifest.json`.

Pure values with a JSON round trip. A manifest is read back as untrusted input, so `from_json` checks each field and
raises `AdapterError`. It holds no clock time and no path of the machine: the same training writes the same bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias, cast, get_args

from muxtune.data.types import Shape
from muxtune.errors import AdapterError

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

FORMAT = "muxtune/1"


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Which weights the adapter belongs to.

    `name` is public (a hub name, never a path of this machine); `weights_sha256` is the hash of the weights that were
    used; `note` says what became of them on the way, such as "dequantised Q4_1".
    """

    name: str
    weights_sha256: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How `sample` must shape a prompt so that it looks like the training data.

    `system` is the system message that all examples shared, if they did. `stop_token_ids` end a reply: the end-of-turn
    token first, then whatever else the model stops at.
    """

    shape: Shape
    system: str | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """`name` is the file's own name, without its folders."""

    name: str
    sha256: str
    examples: int


def installed_versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version()}
    for package in ("muxtune", "torch", "transformers", "tokenizers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class TrainingManifest:
    """`job` is the resolved job, as JSON; `steps` counts the optimizer steps done."""

    base: BaseIdentity
    prompt: PromptFormat
    job: Mapping[str, JsonValue]
    datasets: tuple[DatasetRecord, ...]
    seed: int
    steps: int
    versions: Mapping[str, str] = field(default_factory=installed_versions)

    def to_json(self) -> dict[str, JsonValue]:
        return {"format": FORMAT, **cast("dict[str, JsonValue]", asdict(self))}

    @classmethod
    def from_json(cls, value: Mapping[str, JsonValue], *, where: str) -> TrainingManifest:
        """Raises: AdapterError, naming the field, where `value` is not what `to_json` writes."""
        fields = _Fields(value, where)
        base, prompt = fields.child("base"), fields.child("prompt")
        return cls(
            base=BaseIdentity(base.text("name"), base.text_or_none("weights_sha256"), base.text_or_none("note")),
            prompt=PromptFormat(prompt.shape(), prompt.text_or_none("system"), prompt.integers("stop_token_ids")),
            job=fields.child("job").value,
            datasets=tuple(
                DatasetRecord(row.text("name"), row.text("sha256"), row.integer("examples"))
                for row in fields.children("datasets")
            ),
            seed=fields.integer("seed"),
            steps=fields.integer("steps"),
            versions={key: fields.child("versions").text(key) for key in fields.child("versions").value},
        )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed reads of a JSON object that a stranger may have written."""

    value: Mapping[str, JsonValue]
    where: str

    def child(self, key: str) -> _Fields:
        found = self.value.get(key)
        if not isinstance(found, Mapping):
            raise self._wrong(key, "an object")
        return _Fields(found, f"{self.where}: {key}")

    def children(self, key: str) -> tuple[_Fields, ...]:
        found = self._list(key)
        return tuple(_Fields({"item": item}, f"{self.where}: {key}[{i}]").child("item") for i, item in enumerate(found))

    def text(self, key: str) -> str:
        found = self.value.get(key)
        if not isinstance(found, str):
            raise self._wrong(key, "a string")
        return found

    def text_or_none(self, key: str) -> str | None:
        return None if self.value.get(key) is None else self.text(key)

    def integer(self, key: str) -> int:
        found = self.value.get(key)
        if not isinstance(found, int) or isinstance(found, bool):
            raise self._wrong(key, "an integer")
        return found

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(_Fields({key: item}, self.where).integer(key) for item in self._list(key))

    def shape(self) -> Shape:
        found = self.text("shape")
        if found not in get_args(Shape):
            raise self._wrong("shape", f"one of {', '.join(get_args(Shape))}")
        return cast(Shape, found)

    def _list(self, key: str) -> Sequence[JsonValue]:
        found = self.value.get(key)
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise self._wrong(key, "a list")
        return found

    def _wrong(self, key: str, wanted: str) -> AdapterError:
        return AdapterError(f"{key!r} must be {wanted}", where=self.where, hint="the file was not written by muxtune")
