"""Shared set-up: one thread a worker (two without workers), no network, and small folders and models that many tests
read and none may change."""

from __future__ import annotations

import os

# Before torch or transformers is imported anywhere: both read these once. Tests of packages without torch stay fast,
# because nothing here imports it until a fixture asks.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
# Threads that wait sleep instead of spinning: where another process takes a core, spinning ones make tiny products ten
# to twenty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("muxtune", deadline=None)
settings.load_profile("muxtune")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in Hugging Face layout, fp32, with tokenizer and chat template. Read-only."""
    from tests.tiny import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("tiny") / "llama", "llama")
