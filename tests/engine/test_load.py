"""Which device a name means, and what is said of one that is not there."""

from __future__ import annotations

import pytest
import torch

from muxtune.engine.load import choose_device, device_of_rank
from muxtune.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "cuda_devices", "found"),
    [("cpu", 0, "cpu"), ("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cuda", 1, "cuda"), ("cuda:1", 2, "cuda:1")],
)
def test_a_name_means_a_device(name: str, cuda_devices: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(cuda_devices, monkeypatch)
    assert choose_device(name) == torch.device(found)


def test_one_that_is_not_there_is_said_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(2, monkeypatch)
    with pytest.raises(ConfigError, match=r"device: there is no cuda:9 here.*there are: cuda:0, cuda:1"):
        choose_device("cuda:9")
    _machine(0, monkeypatch)
    with pytest.raises(ConfigError, match="no CUDA device here"):
        choose_device("cuda:0")


@pytest.mark.parametrize(
    ("name", "cuda_devices", "found"),
    [("auto", 0, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda:1"), ("auto", 4, "cuda:1")],
)
def test_each_rank_of_a_machine_has_a_gpu_of_its_own(
    name: str, cuda_devices: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(cuda_devices, monkeypatch)
    assert device_of_rank(name, local=1, here=2) == torch.device(found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda:0", r"device: cuda:0 is one GPU, and 3 ranks.*device: cuda"),
        ("auto", r"3 ranks .* and there are 2.*fewer"),
    ],
)
def test_ranks_that_have_no_gpu_each_are_told(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(2, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        device_of_rank(name, local=0, here=3)


def _machine(cuda_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)
