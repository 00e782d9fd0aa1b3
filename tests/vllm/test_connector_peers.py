"""One engine computes a prompt, and another one goes on with it: what the first holds is a hit at the second."""

import pytest
from connectors import LENGTH, SERVED, connector, host, is_at_rest, probe
from engine import BLOCK, Engine, prompt

TIMEOUT_MS = 20_000
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def worker(model, *peers: str, timeout_ms: int = TIMEOUT_MS) -> Engine:
    """An engine that serves its peers, and reads at these."""
    tiers = host(64, **{"peers.enabled": True, "peers.port": 0, "peers.lease_share": 1.0})
    if peers:
        tiers["peers.addresses"] = ",".join(peers)
    return Engine(model, **connector(tiers, peer_timeout_ms=timeout_ms))


def prefill(engine: Engine, number: int) -> dict:
    """As a proxy asks it; returns what it tells the engine that goes on."""
    told = probe(engine, "ask", prompt=prompt(number, LENGTH), params=PREFILL, tokens=1)["params"]
    # Here an engine takes steps only while it is asked.
    engine.settle()
    return told


def decode(engine: Engine, number: int, params: dict) -> dict:
    return probe(engine, "ask", prompt=prompt(number, LENGTH), params=params)


@pytest.mark.slow
def test_what_one_engine_computed_another_one_goes_on_with(model, said):
    with worker(model) as first:
        own = probe(first, "peer")
        with worker(model, own[1]) as second:
            told = prefill(first, 0)
            assert told["do_remote_prefill"] and not told["do_remote_decode"]
            assert (f"{told['remote_host']}:{told['remote_port']}", told["kvbm_peer"]) == (own[1], own[0])
            went_on = decode(second, 0, told)
            assert went_on["said"] == said[0]
            assert went_on["scheduled"] == SERVED
            assert probe(second, "matches", prompt=prompt(0, LENGTH)) == {"host": LENGTH // BLOCK}
            # What a proxy that builds it anew keeps is enough.
            told = prefill(first, 1)
            kept = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
            params = {"do_remote_prefill": True, "do_remote_decode": False} | {name: told[name] for name in kept}
            went_on = decode(second, 1, params)
            assert (went_on["said"], went_on["scheduled"]) == (said[1], SERVED)
            # Nobody else is asked, whatever a request says.
            params = told | {"remote_port": 1, "kvbm_peer": "somebody"}
            went_on = decode(second, 2, params)
            assert (went_on["said"], went_on["scheduled"]) == (said[2], LENGTH + 7)
            # Nor does it matter what a client sends.
            for wrong in ([], {}, True, -1, "x" * 100_000):
                params = {"do_remote_prefill": True, "kvbm_peer": wrong, "remote_host": wrong, "remote_port": wrong}
                assert decode(second, 2, params | {"remote_num_tokens": wrong})["said"] == said[2]
            went_on = decode(second, 4, prefill(first, 4) | {"remote_num_tokens": -1})
            assert went_on["said"] == said[4]
            # It dies, and what it told is computed here.
            told = prefill(first, 3)
            first.kill()
            went_on = decode(second, 3, told)
            assert (went_on["said"], went_on["scheduled"]) == (said[3], LENGTH + 7)
            assert is_at_rest(second)
        # Others come in their place, and all works again.
        with worker(model) as first, worker(model, probe(first, "peer")[1]) as second:
            went_on = decode(second, 3, prefill(first, 3))
            assert (went_on["said"], went_on["scheduled"]) == (said[3], SERVED)
            assert is_at_rest(first) and is_at_rest(second)
