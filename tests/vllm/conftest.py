"""What tests of real engines share."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

import models
from connectors import LENGTH
from engine import Engine, prompt


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny model whose tokens tell right KV from wrong. `KVBM_MODELS` says where to keep it between runs."""
    kept = os.environ.get("KVBM_MODELS")
    place = Path(kept) if kept else tmp_path_factory.mktemp("models")
    return models.make(place / "tiny", "tiny")


@pytest.fixture(scope="session")
def said(model) -> list[list[int]]:
    """What an engine without connector says to the prompts 0 to 9."""
    with Engine(model, dtype="float32") as engine:
        return [engine.generate(prompt(number, LENGTH)).said[0] for number in range(10)]


@pytest.fixture
def shared_memory():
    """A directory on tmpfs, as persistent memory needs it."""
    directory = tempfile.mkdtemp(dir="/dev/shm", prefix="kvbm-test-")
    yield Path(directory)
    shutil.rmtree(directory)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out by tests/vllm.sh --quick")
