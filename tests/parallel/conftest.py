"""Groups of ranks and folders of models, started and written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parallel.ranks import RankGroup
from tests.tiny import tiny_folder


@pytest.fixture(scope="session")
def pair() -> Iterator[RankGroup]:
    """Two ranks."""
    group = RankGroup(2)
    yield group
    group.close()


@pytest.fixture(scope="session")
def four() -> Iterator[RankGroup]:
    """Four ranks."""
    group = RankGroup(4)
    yield group
    group.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny fp64 model of an architecture. Read-only."""
    return cache(lambda arch: tiny_folder(tmp_path_factory.mktemp("tiny") / arch, arch, dtype=torch.float64))
