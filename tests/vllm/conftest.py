"""What tests of real engines share."""

import os
from pathlib import Path

import pytest

import models


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny model whose tokens tell right KV from wrong. `KVBM_MODELS` says where to keep it between runs."""
    kept = os.environ.get("KVBM_MODELS")
    place = Path(kept) if kept else tmp_path_factory.mktemp("models")
    return models.make(place / "tiny", "tiny")
