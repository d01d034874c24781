"""What the bare backbone thinks of a sequence: the log-probability of its trained tokens, once for each sequence.

DPO compares a task's model with the backbone it started from. That backbone is frozen, so a sequence's value is a
function of (backbone, tokens, mask): it is kept by the hash of these, in memory for all tasks and on disk for all runs.
A second job on the same data, a sweep over beta, a resume: none of them computes a value again. A rejected response
whose prompt is computed with the chosen one's goes by the hash of both: its last bits could be others without that.

`ground` names everything else that a bit of the values could depend on: weights, dtype, device, threads, and the code.
Each ground is one file of (hash, value) pairs. It is read when first needed and written at most every `SAVE_EVERY_S`
seconds, joined with what another process has put there meanwhile; what a race or a kill loses is computed again.

Cost: 32 bytes of hash and 8 of value a sequence; hashing is a few microseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from muxtune.data.prefixes import in_common
from muxtune.data.private_cache import PrivateCache
from muxtune.data.types import TokenSequence

Values = Mapping[bytes, float]
SAVE_EVERY_S = 10.0
DEFAULT_LIMIT_BYTES = 1 << 28
_DIGEST_BYTES = 32


class ReferenceCache(PrivateCache[Values]):
    """Values on disk: an entry a ground."""

    what, suffix = "reference cache", ".references"

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        super().__init__(folder, limit_bytes)

    def encode(self, entry: Values) -> bytes:
        digests = np.frombuffer(b"".join(entry), dtype=np.uint8).reshape(-1, _DIGEST_BYTES)
        values = np.fromiter(entry.values(), dtype=np.float64, count=len(entry))
        body: bytes = safetensors.numpy.save({"digests": digests, "values": values})
        return body

    def decode(self, body: bytes) -> Values | None:
        """None where the two arrays are not what `encode` writes."""
        try:
            arrays = safetensors.numpy.load(body)
            digests, values = arrays["digests"], arrays["values"]
        except (SafetensorError, KeyError):
            return None
        if digests.dtype != np.uint8 or values.dtype != np.float64 or digests.shape != (len(values), _DIGEST_BYTES):
            return None
        return dict(zip((row.tobytes() for row in digests), values.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Asked:
    """A sequence, and the one `beside` it whose rows it shares, where it does."""

    sequence: TokenSequence
    beside: TokenSequence | None = None


def asked_of(source: Sequence[TokenSequence], index: int, *, paired: bool) -> Asked:
    """A sequence of pairs; a rejected one that is `paired` shares the rows of the chosen one."""
    return Asked(source[index], source[index - 1] if paired and index % 2 else None)


@dataclass(frozen=True, slots=True)
class Turn:
    """A sequence that has to run; its first `common` tokens are those of the one whose turn is before."""

    digest: bytes
    sequence: TokenSequence
    common: int = 0


def in_turn(asked: Mapping[bytes, Asked]) -> list[Turn]:
    """All that has to run: each right after the one that it shares rows with, and no other one twice."""
    found: list[Turn] = []
    for digest, one in asked.items():
        if one.beside is not None:
            found.append(Turn(digest_of(one.beside), one.beside))
            found.append(Turn(digest, one.sequence, in_common(one.sequence, one.beside)))
    known = {turn.digest for turn in found}
    return found + [Turn(digest, one.sequence) for digest, one in asked.items() if digest not in known]


class References:
    """Args:
    store, ground: where values are kept beyond this process, and under which name; None keeps them here alone.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: ReferenceCache | None = None,
        ground: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._ground = ground
        self._clock = clock
        self._values: dict[bytes, float] = {}
        self._places: dict[str, dict[int, bytes]] = {}
        self._read = store is None
        self._unsaved = False
        self._saved_at = -math.inf

    def missing(self, source: str, asked: Mapping[int, Asked]) -> dict[bytes, Asked]:
        """What of the `asked`, by their index in `source`, no value is known of, by hash."""
        self._read_store()
        places = self._places.setdefault(source, {})
        for index, one in asked.items():
            if index not in places:
                places[index] = digest_of(one.sequence, one.beside)
        return {places[index]: one for index, one in asked.items() if places[index] not in self._values}

    def learn(self, digests: Iterable[bytes], values: Iterable[float]) -> None:
        """Keep new values; those of a broken backbone (not finite) are not written down."""
        self._values.update(zip(digests, values, strict=True))
        self._unsaved = True
        if self._clock() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def value(self, source: str, index: int) -> float | None:
        """Of a sequence that was asked for with `missing`; None where it is not known."""
        digest = self._places.get(source, {}).get(index)
        return None if digest is None else self._values.get(digest)

    def forget(self, source: str) -> None:
        """The source is gone; the values of its sequences stay."""
        self._places.pop(source, None)

    def save(self) -> None:
        """Write what is new."""
        if self._store is None or not self._unsaved:
            return
        others = self._store.load(self._ground) or {}
        own = {digest: value for digest, value in self._values.items() if math.isfinite(value)}
        self._store.store(self._ground, {**others, **own})
        self._unsaved, self._saved_at = False, self._clock()

    def _read_store(self) -> None:
        if not self._read and self._store is not None:
            self._values = {**(self._store.load(self._ground) or {}), **self._values}
            self._read, self._saved_at = True, self._clock()


def digest_of(sequence: TokenSequence, beside: TokenSequence | None = None) -> bytes:
    """SHA-256 of a sequence's tokens and mask, and of those `beside` it."""
    digest = hashlib.sha256()
    sequence.feed(digest)
    if beside is not None:
        beside.feed(digest)
    return digest.digest()


def ground_of(*parts: object) -> str:
    """The name of the ground that `parts` and the code that runs a backbone make."""
    return hashlib.sha256(json.dumps([*map(str, parts), _code_fingerprint()]).encode()).hexdigest()


@cache
def _code_fingerprint() -> str:
    """Of the code that a value passes through on its way from tokens."""
    here = Path(__file__).parent
    sources: Sequence[Path] = sorted(
        [*(here.parent / "models").glob("*.py"), *(here / f"{name}.py" for name in _PATH), Path(__file__)]
    )
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for package in ("torch", "transformers"):
        digest.update(f"{package}={version(package)}".encode())
    return digest.hexdigest()


_PATH = ("executor", "layout", "packing", "preference")
