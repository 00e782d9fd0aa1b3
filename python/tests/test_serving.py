"""What an engine's process serves where `DYN_KVBM_METRICS=true` asks for it, and what `kvbm why` finds there."""

import ctypes
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_rs import Chain, EngineMemory, Manager, Settings, request_number
from kvbm_rs._native import vllm_request_numbers
from kvbm_rs.errors import KvbmError

SLOTS, BLOCK_BYTES = 4, 4096


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def opened(port: int, directory: Path, **more: str) -> Manager:
    memory = ctypes.create_string_buffer(SLOTS * BLOCK_BYTES)
    parts = [(ctypes.addressof(memory), BLOCK_BYTES, BLOCK_BYTES)]
    tiers = {"block_bytes": BLOCK_BYTES, "disk.capacity": 16 * BLOCK_BYTES, "disk.dirs": str(directory)}
    environment = {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(port), **more}
    return Manager(Settings(tiers, environment=environment), EngineMemory(SLOTS, 1, parts, owner=memory), block_tokens=4)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def manager(port: int, tmp_path: Path) -> Iterator[Manager]:
    manager = opened(port, tmp_path)
    yield manager
    manager.close(10.0)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def why(port: int, name: str) -> dict[str, object]:
    found = json.loads(get(port, f"/v1/why?request={urllib.parse.quote(name, safe='')}"))
    assert isinstance(found, dict)
    return found


def test_an_engine_serves_metrics_and_the_page_if_asked(manager: Manager, port: int) -> None:
    assert get(port, "/healthz") == "ok"
    assert json.loads(get(port, "/readyz")) == {"ready": True, "degraded": []}
    assert 'kvbm_slots{state="free",tier="disk"} 16' in get(port, "/metrics")
    assert get(port, "/").lower().startswith("<!doctype html>")
    manager.close(10.0)
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")


def test_a_taken_port_is_an_error_that_names_the_variable(manager: Manager, port: int, tmp_path: Path) -> None:
    with pytest.raises(KvbmError, match="DYN_KVBM_METRICS_PORT"):
        opened(port, tmp_path / "other")


@pytest.mark.parametrize("variable", ["DYN_KVBM_TRACES", "DYN_KVBM_TRACES_NVTX"])
def test_traces_which_nobody_here_would_take_are_refused(port: int, tmp_path: Path, variable: str) -> None:
    with pytest.raises(KvbmError, match=f"{variable}.*built without"):
        opened(port, tmp_path, **{variable: "true"})


def test_a_request_is_asked_for_by_its_name(manager: Manager, port: int) -> None:
    manager.lease(Chain([bytes(32)] * 3), request=request_number("chatcmpl-1"))
    found = why(port, "chatcmpl-1")
    assert (found["request"], found["blocks"]) == (request_number("chatcmpl-1"), 3)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        why(port, "chatcmpl-2")


def test_a_number_is_its_own_name() -> None:
    assert request_number("17") == 17
    assert 0 <= request_number("chatcmpl-17") < 1 << 53, "readers of JSON keep so much"


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("chatcmpl-b51c-0a1b2c3d", "chatcmpl-b51c"),
        ("cmpl-b51c-0-0a1b2c3d", "cmpl-b51c-0"),
        ("1_chatcmpl-b51c-0a1b2c3d", "1_chatcmpl-b51c"),
        ("7-0a1b2c3d", "7"),
        # These have no random digits behind them.
        ("chatcmpl-b51c", "chatcmpl-b51c"),
        ("chatcmpl-0a1b2c3x", "chatcmpl-0a1b2c3x"),
        ("request", "request"),
        ("", ""),
    ],
)
def test_what_vllm_appends_to_a_name_is_not_asked_for(inside: str, outside: str) -> None:
    assert vllm_request_numbers(inside) == (request_number(outside), request_number(inside))
