"""Requests of vLLM are asked for by the names that its clients have: what `kvbm why --request chatcmpl-…` says."""

import json
import socket
import urllib.error
import urllib.parse
import urllib.request

import pytest
from connectors import LENGTH, connector, host, is_at_rest
from engine import Engine, prompt
from offloading import PAGE, Offloading, chain


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def served(port: int) -> dict:
    """The variables with which a process serves what it knows."""
    return {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(port)}


def why(port: int, name: str) -> dict:
    url = f"http://127.0.0.1:{port}/v1/why?request={urllib.parse.quote(name, safe='')}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def generate(engine, tokens: list[int], name: str, n: int = 1, times: int = 1) -> None:
    """In the engine's process: requests of this name, all at a time."""
    from vllm import SamplingParams

    asked = engine.llm.llm_engine
    for seed in range(times):
        params = SamplingParams(max_tokens=4, n=n, seed=seed, temperature=1.0)
        asked.add_request(name, {"prompt_token_ids": tokens}, params)
    while asked.has_unfinished_requests():
        asked.step()


def ask(engine: Engine, name: str, **more) -> None:
    engine.call("test_why:generate", tokens=prompt(0, LENGTH), name=name, **more)


def test_the_connector_knows_requests_by_the_ids_of_their_answers(model, port):
    with Engine(model, environment=served(port), **connector(host(64))) as engine:
        ask(engine, "chatcmpl-one")
        assert why(port, "chatcmpl-one")["next"]["reason"] == "never_seen"
        engine.settle()
        assert engine.reset()
        ask(engine, "chatcmpl-two")
        two = why(port, "chatcmpl-two")
        assert {"tier": "host", "blocks": 10} in two["found"] and two["next"] is None, two
        with pytest.raises(urllib.error.HTTPError, match="404"):
            why(port, "chatcmpl-three")
        # Samples of one request, and a client that names several alike at a time.
        ask(engine, "chatcmpl-n", n=3)
        assert len({why(port, f"{sample}_chatcmpl-n")["request"] for sample in range(3)}) == 3
        ask(engine, "chatcmpl-same", times=3)
        assert why(port, "chatcmpl-same")["blocks"] == 10
        assert is_at_rest(engine)


def test_the_tier_knows_requests_by_the_ids_of_their_answers(tmp_path, port, monkeypatch):
    for variable, value in served(port).items():
        monkeypatch.setenv(variable, value)
    tier = {
        "type": "KvbmTier",
        "module_path": "kvbm_rs.vllm.tier",
        "host.staging_blocks": 16,
        "host.huge_pages": False,
        "disk.capacity": "512 blocks",
        "disk.dirs": str(tmp_path),
        "weights": "made up",
    }
    with Offloading(tier, row=4 * PAGE) as below:
        below.names = iter(["chatcmpl-1-0a1b2c3d", "chatcmpl-2-0a1b2c3d", "chatcmpl-2-0a1b2c3e", "chatcmpl-3-0a1b2c3d"])
        keys = chain(1, 10)
        below.save(keys)
        below.forget_primary()
        two, alike = below.begin(keys[:4]), below.begin(chain(2, 3))
        assert below.look_up(two, keys[:4]) == 4 and below.look_up(alike, chain(2, 3)) == 0
        assert why(port, "chatcmpl-2")["blocks"] == 4
        assert why(port, "chatcmpl-2-0a1b2c3e")["next"]["reason"] == "never_seen", "two of one name live"
        below.end(two)
        below.end(alike)
        assert below.tier.stats()["requests"] == 0
