"""Clusters: what a file says, what is refused and where, and what a message takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic_core import to_json

from muxtune.errors import ConfigError
from muxtune.spec import ClusterSpec, Link, load_cluster
from muxtune.spec.cluster import cluster_place
from tests.spec.configs import write

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.yaml"

pytestmark = pytest.mark.usefixtures("folder")


def load(text: str) -> ClusterSpec:
    write(Path(), text, "cluster.yaml")
    return load_cluster("cluster.yaml")


def test_the_example() -> None:
    assert load_cluster(EXAMPLE) == ClusterSpec(
        devices=4,
        memory=48_000_000_000,
        tp=2,
        pp=2,
        tp_link=Link(bandwidth=50_000_000_000, latency_s=5e-6),
        pp_link=Link(bandwidth=12_000_000_000, latency_s=1e-5),
        speed=1,
    )


def test_the_default_is_the_device_that_was_measured() -> None:
    one = ClusterSpec()
    assert (one.devices, one.tp, one.pp, one.memory, one.speed) == (1, 1, 1, None, 1)
    assert one.all_reduce_s(1e9) == one.send_s(1e9) == 0
    assert load("memory: null\nspeed: ~\n") == one


def test_json_round_trip() -> None:
    cluster = load_cluster(EXAMPLE)
    assert ClusterSpec.model_validate_json(to_json(cluster)) == cluster


@pytest.mark.parametrize("written", ["3GB/s", "3GB", "3 GB/s", "3e9", "3000000000"])
def test_a_bandwidth_is_bytes_a_second_however_it_is_written(written: str) -> None:
    assert Link.model_validate({"bandwidth": written}).bandwidth == 3_000_000_000


@pytest.mark.parametrize(
    ("text", "where", "told"),
    [
        ("", "cluster.yaml", "devices, memory, tp, pp"),
        ("tp: 1\npp: 0\n", "cluster.yaml:2 pp", "at least 1"),
        ("devices: 2.5\n", "cluster.yaml:1 devices", "whole number"),
        ("speed: 0\n", "cluster.yaml:1 speed", "at least"),
        ("speed: 1e-300\n", "cluster.yaml:1 speed", "at least"),
        ("tp: 1\npp_link: 5GB/s\n", "cluster.yaml:2 pp_link", "a bandwidth and a latency, got '5GB/s'"),
        ("tp_link: {bandwidth: -5GB/s}\n", "cluster.yaml:1 tp_link.bandwidth", "got '-5GB/s'"),
        ("tp_link: {bandwidth: 1, latency_s: 1e9}\n", "cluster.yaml:1 tp_link.latency_s", "at most"),
        ("memory: lots\n", "cluster.yaml:1 memory", "should be a size"),
        ("device: 2\n", "cluster.yaml:1 device", "did you mean 'devices'?"),
        ("tp: 1\ndevices: 2\n", "cluster.yaml:2 devices", "devices: 1, or a tp and pp whose product is 2"),
        ("devices: 2\ntp: 2\npp: 2\n", "cluster.yaml:1 devices", "uses 4, but there are 2"),
        ("devices: 2\ntp: 2\n", "cluster.yaml tp_link", "tp_link: {bandwidth: "),
        ("devices: 2\npp: 2\ntp_link: {bandwidth: 1}\n", "cluster.yaml pp_link", "is missing: pp is 2"),
        ("tp_link:\n  bandwidth: 0\n", "cluster.yaml:2 tp_link.bandwidth", "at least 1"),
        ("tp_link: {latency_s: 1}\n", "cluster.yaml:1 tp_link.bandwidth", "is missing"),
        ("tp_link: {bandwidth: 1, latency_s: -1}\n", "cluster.yaml:1 tp_link.latency_s", "at least 0"),
    ],
)
def test_what_is_refused_names_its_line_and_what_to_do(text: str, where: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.where == where
    assert told in str(caught.value)


def test_what_a_plan_finds_wrong_has_a_place(folder: Path) -> None:
    write(Path(), "devices: 3\ntp: 3\ntp_link: {bandwidth: 1GB}\n", "cluster.yaml")
    assert cluster_place("cluster.yaml", "tp") == "cluster.yaml:2 tp"
    assert cluster_place("cluster.yaml", "memory") == "cluster.yaml memory"


def test_what_messages_take() -> None:
    link = Link(bandwidth=100, latency_s=0.5)
    assert link.send_s(200) == 2.5
    assert [link.all_reduce_s(200, devices) for devices in (1, 2, 4)] == [0, 2.5, 3.5]
    cluster = ClusterSpec(devices=8, tp=4, pp=2, tp_link=link, pp_link=link)
    assert (cluster.all_reduce_s(200), cluster.send_s(200)) == (3.5, 2.5)
