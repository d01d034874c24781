"""A shell for command lines, data to train on, and one finished run that many tests look at and none may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.projects import TRAINED, write_config, write_data
from tests.cli.shell import Shell


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def environment(cache: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "NO_COLOR": ""}


@pytest.fixture(autouse=True)
def _same_environment(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process see what those in the shell see."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data in data/."""
    folder = tmp_path_factory.mktemp("project")
    write_data(folder)
    return folder


@pytest.fixture(scope="session")
def shell(project: Path, environment: dict[str, str]) -> Iterator[Shell]:
    found = Shell(project, environment)
    yield found
    found.close()


@pytest.fixture(scope="session")
def trained(shell: Shell, project: Path, tiny_llama: Path) -> Path:
    """The output folder of a finished run of TRAINED."""
    write_config(project / "trained.yaml", tiny_llama, "trained", TRAINED)
    ended = shell.run("train", "trained.yaml")
    assert ended.code == 0, ended.err
    return project / "trained"
