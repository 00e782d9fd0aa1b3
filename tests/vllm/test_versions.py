"""Versions of vLLM that the package has not been tested with are named at the start."""

import logging

import pytest
import vllm

from kvbm_rs.vllm import versions


def said(version: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    versions.logger.addHandler(handler)
    try:
        versions.warn("KvbmConnector", version)
    finally:
        versions.logger.removeHandler(handler)
    return records


@pytest.mark.parametrize("version", ["0.29.0", "0.31.1", "0.33.0", "0.32.1.dev3", "dev"])
def test_an_untested_version_is_named(version: str) -> None:
    (warning,) = said(version)
    assert warning == f"KvbmConnector is tested with vLLM 0.32.0, and has never run with {version}, which this is"


def test_the_tested_one_is_fine() -> None:
    assert said("0.32.0") == said("0.32.0+cpu") == said(vllm.__version__) == []
