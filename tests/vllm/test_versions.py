"""Versions of vLLM that the package has not been tested with are named at the start."""

import logging
from pathlib import Path

import pytest
import vllm
from connectors import LENGTH, SERVED, connector, host, is_at_rest
from engine import Engine, prompt
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm import versions


def warned(version: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    versions.logger.addHandler(handler)
    try:
        versions.warn("KvbmConnector", version)
    finally:
        versions.logger.removeHandler(handler)
    return records


@pytest.mark.parametrize("version", ["0.28.0", "0.31.1", "0.34.0", "0.32.1.dev3", "dev"])
def test_an_untested_version_is_named(version: str) -> None:
    (warning,) = warned(version)
    assert warning == f"KvbmConnector is tested with vLLM 0.32.0, and has never run with {version}, which this is"


def test_one_that_was_tried_is_named_with_what_was_tried() -> None:
    (warning,) = warned("0.29.0+cpu")
    assert "with 0.29.0+cpu hits and restarts were tried by hand" in warning


def test_the_tested_one_is_fine() -> None:
    assert warned("0.32.0") == warned("0.32.0+cpu") == warned(vllm.__version__) == []


def test_what_an_old_version_does_not_show_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check_shows_tables("layerwise")
    monkeypatch.delattr(base.KVConnectorBase_V1, "bind_kv_cache_manager")
    with pytest.raises(InvalidError, match="layerwise takes vLLM 0.32.0, and this is 0.29.0"):
        versions.check_shows_tables("layerwise", "0.29.0")


@pytest.mark.slow
def test_a_connector_shown_only_the_pool_keeps_what_ends(model: Path, said: list[list[int]]) -> None:
    """As vLLM 0.29 has it, without tables of requests that run: blocks are saved when their request ends."""
    arguments = connector(host(64))
    arguments["kv_transfer_config"] |= {"kv_connector": "OldConnector", "kv_connector_module_path": "old_connector"}
    with Engine(model, **arguments) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)
