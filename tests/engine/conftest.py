"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.runs import Trainer, scratch, write_data


@pytest.fixture(scope="session")
def data() -> Iterator[Path]:
    """The data files of `tests.engine.runs`. Read-only."""
    with scratch() as folder:
        yield write_data(folder)


@pytest.fixture
def disk() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="session")
def cache() -> Iterator[Path]:
    """A cache of tokens for all runs in this process."""
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """A process that starts others that train."""
    with scratch() as folder:
        trainer = Trainer(folder)
        yield trainer
        trainer.close()
