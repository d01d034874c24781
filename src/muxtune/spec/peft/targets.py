"""How a spec names the modules it adapts: all of a kind, or literal names and suffixes; never a pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator

from muxtune.errors import AdapterError, ConfigError
from muxtune.spec.peft.base import Kind, PeftBase, Place
from muxtune.spec.scalars import clip, nearest, read_flag

ALL_LINEAR = "all-linear"
ALL_NORMS = "all-norms"
ENDS: tuple[Kind, ...] = ("embedding", "head")

_TARGET_KEYS = ("target_modules", "feedforward_modules")
_MODULE_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def _reader(everything: str) -> Callable[[object], object]:
    """Reads `everything`, or module names as a list or with commas: literal suffixes or full names, never patterns.

    A mapping of names to flags, as mLoRA has it, is the list of those that are true.
    """

    def read(value: object) -> object:
        if isinstance(value, str):
            if value.strip().lower() in ("all", everything):
                return everything
            value = value.split(",")
        if isinstance(value, Mapping):
            value = [name for name, wanted in value.items() if read_flag(wanted)]
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"should be {everything!r} or a list of module names, got {clip(value)}")
        return tuple(dict.fromkeys(_read_module_name(name) for name in value))

    return read


def _read_module_name(value: object) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if not _MODULE_NAME.fullmatch(name) or len(name) > 256:
        raise ConfigError(
            f"should be the name of a module, got {clip(value)}",
            hint="a literal suffix such as q_proj or a full name; patterns are not read",
        )
    return name


def _read_names(value: object) -> object:
    """Module names as a list or with commas; a list may be empty."""
    return () if value in ((), []) else _reader(ALL_LINEAR)(value)


Names = Annotated[tuple[str, ...], BeforeValidator(_read_names)]
Targets = Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_reader(ALL_LINEAR))]
NormTargets = Annotated[Literal["all-norms"] | tuple[str, ...], BeforeValidator(_reader(ALL_NORMS))]


def targeted(targets: str | tuple[str, ...], places: Iterable[Place], *kinds: Kind) -> list[Place]:
    """Those of `kinds` (linears, where none is said) among `places` that `targets` names (peft's rule: a whole path, or
    a suffix at a dot). All of a kind are all of the first: the embedding and the head are only ever named."""
    kinds = kinds or ("linear",)
    if isinstance(targets, str):
        return [place for place in places if place.kind == kinds[0]]
    return [place for place in places if place.kind in kinds and any(_names(target, place) for target in targets)]


def unmatched(targets: str | tuple[str, ...], places: Iterable[Place], *kinds: Kind) -> tuple[str, ...]:
    """The targets that name none of `kinds` among `places`."""
    own = [place for place in places if place.kind in (kinds or ("linear",))]
    wanted = () if isinstance(targets, str) else targets
    return tuple(target for target in wanted if not any(_names(target, place) for place in own))


def refuse_unmatched(spec: PeftBase, places: Iterable[Place]) -> None:
    """Raises AdapterError, `where` the key of the spec, for a target that names nothing it could train: with the
    nearest name and all names that there are."""
    places = tuple(places)
    refuse_ends(spec, places)
    unknown = spec.unmatched(places)
    if not unknown:
        return
    key = next((key for key in _TARGET_KEYS if set(unknown) & set(getattr(spec, key, None) or ())), None)
    if key is None:
        lacking = ", ".join(unknown)
        hint = "choose another type of adapter"
        raise AdapterError(f"the base model has nothing that {spec.label} needs: {lacking}", where="type", hint=hint)
    unknown = tuple(name for name in unknown if name in getattr(spec, key))
    known = _nameable(spec, key, places)
    near = nearest(unknown[0].rpartition(".")[2], known)
    guess = f"did you mean {near!r}? " if near else ""
    everything = type(spec).model_fields[key].default
    also = f", or {everything!r}" if isinstance(everything, str) else ""
    raise AdapterError(
        f"{', '.join(map(repr, unknown))} is nothing in the base model that {spec.label} trains",
        where=key,
        hint=f"{guess}it has: {', '.join(known)}{also}",
    )


def _nameable(spec: PeftBase, key: str, places: Iterable[Place]) -> list[str]:
    """The last parts of the names that the spec's `key` may hold: those it would find something by."""
    names = sorted({place.name.rpartition(".")[2] for place in places})
    return [name for name in names if name not in spec.model_copy(update={key: (name,)}).unmatched(places)]


def refuse_ends(spec: PeftBase, places: Iterable[Place]) -> None:
    """Raises AdapterError where a spec's targets name the token embedding or the head, and its type trains neither."""
    places = tuple(places)
    for target in spec.unmatched(places):
        for place in places:
            if place.kind in ENDS and _names(target, place):
                what = "head" if place.kind == "head" else "token embedding"
                raise AdapterError(
                    f"{target!r} is the base model's {what}, which {spec.label} does not train",
                    where="target_modules",
                    hint="leave it out, or use lora or rslora",
                )


def _names(target: str, place: Place) -> bool:
    return place.name == target or place.name.endswith(f".{target}")
