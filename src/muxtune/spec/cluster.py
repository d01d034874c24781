"""ClusterSpec: which devices a plan is made for, how they are linked, and over how many a model is split.

    tp devices hold one stage together (tensor parallelism), pp stages hold the model (pipeline parallelism)

A plan uses all devices of its cluster: data-parallel replicas do not exist, so devices that neither degree uses are
refused rather than left idle. A link is described as the alpha-beta model has it: a message of n bytes takes
latency_s + n / bandwidth seconds. `load_cluster` reads a YAML file; faults name file, line and key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.border import Spec
from muxtune.spec.load import validated
from muxtune.spec.merge import without_nulls
from muxtune.spec.run import MAX_DEVICES
from muxtune.spec.scalars import Integer, Number, Size, clip, read_size
from muxtune.spec.tree import Origin, Table, way_to
from muxtune.spec.yaml_tree import read_yaml

MAX_LATENCY_S = 60
MAX_SPEED = 1_000_000  # a device against the one that was measured, or the other way round


def _read_bandwidth(value: object) -> int:
    """Bytes a second: a size, with or without `/s`."""
    try:
        return read_size(value.strip().removesuffix("/s") if isinstance(value, str) else value)
    except ConfigError:
        raise ConfigError(
            f"should be a bandwidth, got {clip(value)}",
            hint="50GB/s: bytes a second, or a number with kB/s, MB/s, GB/s or TB/s, below 2^63",
        ) from None


def _read_link(value: object) -> object:
    """A link has two numbers, so that one alone is not taken for both."""
    if value is None or isinstance(value, Mapping | Link):
        return value
    raise ConfigError(
        f"should be a bandwidth and a latency, got {clip(value)}", hint="{bandwidth: 50GB/s, latency_s: 5e-6}"
    )


class Link(Spec):
    """Between two devices, each way: `bandwidth` in bytes a second, `latency_s` of a message."""

    bandwidth: Annotated[int, BeforeValidator(_read_bandwidth), Field(ge=1)]
    latency_s: Annotated[Number, Field(ge=0, le=MAX_LATENCY_S)] = 0

    def send_s(self, size_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency_s + size_bytes / self.bandwidth

    def all_reduce_s(self, size_bytes: float, devices: int) -> float:
        """Seconds of a ring all-reduce (Patarasuk and Yuan 2009), which moves 2 (p - 1) / p of the bytes over every
        link; 0 for one device. `latency_s` is charged once: it is that of a whole small collective, as measured."""
        if devices == 1:
            return 0.0
        return self.latency_s + 2 * (devices - 1) / devices * size_bytes / self.bandwidth


class ClusterSpec(Spec):
    """By default the one device that was measured.

    `speed`: of each device, in units of the one whose operator table is used. `memory` in bytes; None: no limit.
    """

    devices: Annotated[Integer, Field(ge=1, le=MAX_DEVICES)] = 1
    memory: Annotated[Size, Field(ge=1)] | None = None
    tp: Annotated[Integer, Field(ge=1, le=MAX_DEVICES)] = 1
    pp: Annotated[Integer, Field(ge=1, le=MAX_DEVICES)] = 1
    tp_link: Annotated[Link | None, BeforeValidator(_read_link)] = None  # between the devices of a stage
    pp_link: Annotated[Link | None, BeforeValidator(_read_link)] = None  # between the devices of neighbouring stages
    speed: Annotated[Number, Field(ge=1 / MAX_SPEED, le=MAX_SPEED)] = 1

    @model_validator(mode="after")
    def _all_used(self) -> Self:
        used = self.tp * self.pp
        if used != self.devices:
            raise ConfigError(
                f"tp {self.tp} x pp {self.pp} uses {used}, but there are {self.devices}",
                where="devices",
                hint=f"devices: {used}, or a tp and pp whose product is {self.devices}; there are no replicas",
            )
        return self

    @model_validator(mode="after")
    def _linked(self) -> Self:
        for degree, link in (("tp", "tp_link"), ("pp", "pp_link")):
            if getattr(self, degree) > 1 and getattr(self, link) is None:
                raise ConfigError(
                    f"is missing: {degree} is {getattr(self, degree)}",
                    where=link,
                    hint=f"{link}: {{bandwidth: 50GB/s, latency_s: 5e-6}}, as measured between two devices",
                )
        return self

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds of a collective of a stage; 0 where a stage is one device."""
        return 0.0 if self.tp_link is None else self.tp_link.all_reduce_s(size_bytes, self.tp)

    def send_s(self, size_bytes: float) -> float:
        """Seconds of a message from one stage to the next; 0 where there is one stage."""
        return 0.0 if self.pp_link is None else self.pp_link.send_s(size_bytes)


def load_cluster(path: str | os.PathLike[str]) -> ClusterSpec:
    """The cluster that a YAML file describes; a null gives a key its default. Raises ConfigError."""
    return validated(ClusterSpec, _table(path), "")


def cluster_place(path: str | os.PathLike[str], key: str) -> str:
    """File, line and key: where a cluster's file gives `key`, for what is found wrong only when a plan is made."""
    *_, nearest_given = way_to(_table(path), (key,))
    return nearest_given.origin.at("", key)


def _table(path: str | os.PathLike[str]) -> Table:
    table = without_nulls(read_yaml(path, belongs="devices, memory, tp, pp, tp_link, pp_link and speed belong here"))
    return replace(table, origin=Origin(os.fspath(path)))
