"""One rank of a run: how it meets the others, and what it does if it is not the first.

Rank 0 trains as one device does (`muxtune.cli.train`) and leads; every other follows until it ends. Before anything is
loaded all say what they are, and who differs from rank 0 is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from muxtune.cli.rank_place import LOGS, LOST, RankPlace, write_to_log
from muxtune.cli.terminal import tell
from muxtune.data.manifest import installed_versions
from muxtune.engine.failure import brief
from muxtune.engine.follow import Follower
from muxtune.engine.load import device_of_rank
from muxtune.engine.ranks import Ranks
from muxtune.errors import MuxTuneError, RankError
from muxtune.models.cache import default_cache_dir
from muxtune.parallel.channel import Channel, Message, open_channel
from muxtune.parallel.layout import RankLayout
from muxtune.parallel.mesh import TensorAxis, join
from muxtune.spec.run import RunSpec

_SAME = ("muxtune", "torch", "transformers")
_SLACK = 1.25  # where a starter watches, it is the one to say who does not answer


@contextmanager
def leading(place: RankPlace, run: RunSpec, layout: RankLayout, timeout_s: float) -> Iterator[Ranks]:
    """Rank 0's ranks, met and agreed. Raises RankError."""
    try:
        channel, axis, device = _meet(place, run, timeout_s)
    except RankError as error:
        raise place.diagnose(error) from error
    ranks = Ranks(channel, axis, layout, device=device, here=place.here, timeout_s=timeout_s, diagnose=place.diagnose)
    with ranks.leading():
        yield ranks


def follow(place: RankPlace, run: RunSpec, timeout_s: float) -> int:
    """The exit status of a rank that is not the first. It stops when rank 0 does, whatever signals say."""
    if place.folder is None:
        write_to_log(Path(run.output_dir) / LOGS / f"{place.rank}.log")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        channel, axis, device = _meet(place, run, timeout_s)
        Follower(channel, axis, device=device, cache_dir=default_cache_dir()).run()
    except RankError as error:
        tell(f"error: {error}")
        if error.rank != place.rank:
            return LOST
        place.confess(error)
        return 1
    except Exception as error:
        tell("".join(traceback.format_exception(error)).rstrip())
        told = str(error) if isinstance(error, MuxTuneError) else brief(error)
        place.confess(RankError(f"failed: {told}", rank=place.rank))
        return 1
    return 0


def _meet(place: RankPlace, run: RunSpec, timeout_s: float) -> tuple[Channel, TensorAxis, torch.device]:
    """How all ranks speak, and this one's device. Raises RankError, and ConfigError for a device that is not there."""
    device = device_of_rank(run.device, place.local, place.here)
    if place.folder is not None:
        timeout_s *= _SLACK
    elif place.here == place.size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        axis = join(place.rank, place.size, meeting=place.meeting, timeout_s=timeout_s, device=device)
    except RankError as error:
        if place.folder is None and "address already in use" in str(error.__cause__).lower():
            raise _taken(place) from error
        raise
    channel = open_channel(axis, range(place.size), timeout_s=timeout_s)
    _introduce(channel, run, device)
    return channel, axis, device


def _taken(place: RankPlace) -> RankError:
    port = os.environ.get("MASTER_PORT", "")
    return RankError(
        f"port {port} is taken on this machine, so the ranks cannot meet there",
        rank=place.rank,
        hint="choose another MASTER_PORT; `muxtune train CONFIG --tp N` and torchrun --standalone need none",
    )


def _introduce(channel: Channel, run: RunSpec, device: torch.device) -> None:
    """Raises RankError, on all ranks, for the first that is not what rank 0 is."""
    own = {name: number for name, number in installed_versions().items() if name in _SAME}
    first, *others = channel.exchange({**own, "device": device.type, "run": _fingerprint(run)})
    for rank, other in enumerate(others, start=1):
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                raise RankError(
                    _differs(name, first, other),
                    rank=rank,
                    hint="install the same versions, and give the same config file, on all machines",
                )


def _differs(name: str, first: Message, other: Message) -> str:
    if name == "run":
        return "has another config than rank 0"
    if name == "device":
        return f"would run on {other.get(name)}, rank 0 on {first.get(name)}: say which with device"
    return f"has {name} {other.get(name)}, rank 0 has {first.get(name)}"


def _fingerprint(run: RunSpec) -> str:
    """Of what a config says, but for where files lie on a machine."""
    said = run.model_dump(mode="json", exclude={"output_dir"})
    for job in said["jobs"]:
        for key in ("datasets", "validation", "adapter_path", "chat_template"):
            job.pop(key, None)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
