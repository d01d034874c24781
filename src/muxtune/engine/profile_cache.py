"""Operator tables on disk: a file for each (shapes of the model, block, device, dtype, threads, torch, version).

Weights do not matter to what an operator takes, so every model of the same shapes shares a table; nor does the code
around the operators, but for what `muxtune.plan.profile.VERSION` stands for. A file is private to its user, whole or
absent, and deleted where it is damaged (`muxtune.data.private_cache`). One process measures at a time; another waits
and takes what it finds then.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from filelock import FileLock, Timeout

from muxtune.data.private_cache import PrivateCache
from muxtune.engine.profiler import device_name, dtype_name, measure
from muxtune.models import attention
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.skeleton import skeleton
from muxtune.plan.profile import VERSION, OperatorTable, from_json

FOLDER = "profiles"  # of the cache
LOCK = "profiles.lock"  # beside it: held by who measures
LONGEST_WAIT_S = 300.0
DEFAULT_LIMIT_BYTES = 1 << 24


class Measure(Protocol):
    """`muxtune.engine.profiler.measure`, or what stands in for it."""

    def __call__(self, backbone: Backbone, *, model: str) -> OperatorTable: ...


class ProfileCache(PrivateCache[OperatorTable]):
    """Tables in one folder."""

    what, suffix = "profile cache", ".profile"

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        super().__init__(folder, limit_bytes)

    def encode(self, entry: OperatorTable) -> bytes:
        return entry.to_json().encode()

    def decode(self, body: bytes) -> OperatorTable | None:
        return from_json(body)

    def path(self, key: str) -> Path:
        """Where the entry is kept."""
        return self.folder / f"{key}{self.suffix}"


@dataclass(frozen=True, slots=True)
class KeptTable:
    """A table and its place. `fresh`: it has been measured just now. `kept`: it is there, and not only should be."""

    table: OperatorTable
    path: Path
    fresh: bool
    kept: bool = True


def kept_table(
    backbone: Backbone,
    cache_dir: Path,
    *,
    fresh: bool = False,
    model: str = "",
    measuring: Measure = measure,
    now: Callable[[], float] = time.time,
    notice: Callable[[str], None] = lambda text: None,
) -> KeptTable:
    """The table of this backbone on its device with the threads there are: kept, or else measured, which takes some
    seconds, and kept.

    Args:
        fresh: measure in any case.
        model: what a new table calls the model.
        measuring: is asked for a table that is not there.
        now: Unix time.
        notice: is told that another process measures, which this one waits for, and then "".
    """
    cache, key = ProfileCache(cache_dir / FOLDER), key_of(backbone)
    if not fresh and (found := cache.load(key)) is not None:
        return KeptTable(found, cache.path(key), fresh=False)
    with _alone(cache_dir, notice):
        if not fresh and (found := cache.load(key)) is not None:  # measured by another process meanwhile
            return KeptTable(found, cache.path(key), fresh=False)
        table = replace(measuring(backbone, model=model), measured_at_s=now())
        return KeptTable(table, cache.path(key), fresh=True, kept=cache.store(key, table))


@contextmanager
def _alone(cache_dir: Path, notice: Callable[[str], None]) -> Iterator[None]:
    """Within, no other process of this cache measures: two at once would spoil each other's figures, and make the same
    table twice. Where there can be no lock, or one is held for too long, it is done without."""
    lock: FileLock | None = None
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(cache_dir / LOCK, timeout=LONGEST_WAIT_S, thread_local=False)
        _acquire(lock, notice)
    except (OSError, Timeout, NotImplementedError):
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquire(lock: FileLock, notice: Callable[[str], None]) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notice("waiting for another process, which measures what operators cost here")
        try:
            lock.acquire()
        finally:
            notice("")


def find_table(
    folder: Path, cache_dir: Path, *, device: torch.device, dtype: torch.dtype, block: BlockChoice = "auto"
) -> OperatorTable | None:
    """The kept table of the model in a checked folder, with the threads there are; no weight is loaded."""
    attention.register()
    key = key_of(Backbone(skeleton(folder), block), device=device, dtype=dtype)
    return ProfileCache(cache_dir / FOLDER).load(key)


def key_of(backbone: Backbone, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str:
    """The name of a backbone's table: a hash of everything that decides what is measured. On its own device and in its
    own dtype, unless told otherwise."""
    shapes = {name: list(value.shape) for name, value in backbone.model.named_parameters()}
    parts = [
        VERSION,
        shapes,
        backbone.config.model_type,
        backbone.attention_shape,
        backbone.block,
        backbone.max_positions,
        device_name(device or backbone.device),
        dtype_name(dtype or backbone.dtype),
        torch.get_num_threads(),
        torch.__version__,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
