"""One engine computes a prompt, and another one goes on with it: what the first holds is a hit at the second."""

import contextlib
import os
from collections.abc import Iterator

import models
import pytest
from connectors import LENGTH, ONE_LEFT, SERVED, WHOLE, connector, host, is_at_rest, probe
from engine import BLOCK, Engine, prompt

TIMEOUT_MS = 20_000
# Workers of an engine, and tokens of its blocks.
FORMS = [((1, 32), (2, 32)), ((2, 32), (1, 32)), ((2, 32), (2, 64)), ((2, 64), (1, 32))]
# How often a reader comes too late.
LATE = int(os.environ.get("KVBM_LATE_READS", "5"))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def worker(
    model,
    *peers: str,
    role: str,
    policy: str = "recompute",
    blocks: int = 64,
    timeout_ms: int = TIMEOUT_MS,
    workers: int = 0,
    block_tokens: int = BLOCK,
    options: dict | None = None,
    **settings,
) -> Engine:
    """An engine of these options that serves its peers, and reads at these. With `workers` these are processes of their own."""
    tiers = host(blocks, **{"peers.enabled": True, "peers.port": 0, "peers.lease_share": 1.0}, **settings)
    if peers:
        tiers["peers.addresses"] = ",".join(peers)
    apart = {
        "tensor_parallel_size": workers,
        "distributed_executor_backend": "mp",
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    more = (apart if workers else {}) | (options or {})
    told = connector(tiers, policy, role, peer_timeout_ms=timeout_ms)
    return Engine(model, block_size=block_tokens, **(told | more))


@contextlib.contextmanager
def pair(model, first: dict | None = None, second: dict | None = None, **both) -> Iterator[tuple[Engine, Engine]]:
    """An engine that prefills, and one that decodes and reads there, with options of each and of both."""
    with worker(model, **{"role": "kv_producer", **both, **(first or {})}) as producer:
        address = probe(producer, "peer")[1]
        with worker(model, address, **{"role": "kv_consumer", **both, **(second or {})}) as consumer:
            yield producer, consumer


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
    with pair(model) as (first, second):
        own = probe(first, "peer")
        told = prefill(first, 0)
        host, _, port = own[1].rpartition(":")
        engine, request = told.pop("remote_engine_id"), told.pop("remote_request_id")
        assert engine and request.startswith("asked")
        assert told == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[]],
            "remote_host": host,
            "remote_port": int(port),
            "remote_num_tokens": LENGTH,
            "remote_blocks_expiry_time": None,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
            # Of vLLM's scheduler.
            "remote_prefill_cached_tokens": 0,
            "kvbm_peer": own[0],
            "kvbm_block_tokens": [BLOCK, BLOCK],
        }
        went_on = decode(second, 0, told)
        assert went_on["said"] == said[0]
        assert went_on["scheduled"] == SERVED
        # It came straight into the engine's blocks, and is saved from there.
        second.settle()
        assert probe(second, "matches", prompt=prompt(0, LENGTH)) == {"host": LENGTH // BLOCK}
        assert second.reset()
        again = probe(second, "ask", prompt=prompt(0, LENGTH))
        assert (again["said"], again["scheduled"]) == (said[0], SERVED)
        # Of a prompt that is all full blocks a token is left.
        told = probe(first, "ask", prompt=WHOLE, params=PREFILL, tokens=1)["params"]
        whole = first.generate(WHOLE).said[0]
        first.settle()
        went_on = probe(second, "ask", prompt=WHOLE, params=told)
        assert (went_on["said"], went_on["scheduled"]) == (whole, ONE_LEFT)
        # What a proxy that builds it anew keeps is enough.
        told = prefill(first, 1)
        kept = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
        params = {"do_remote_prefill": True, "do_remote_decode": False} | {name: told[name] for name in kept}
        went_on = decode(second, 1, params)
        assert (went_on["said"], went_on["scheduled"]) == (said[1], SERVED)
        # No other peer is asked, whatever a request says.
        params = told | {"remote_port": 1, "kvbm_peer": "somebody"}
        went_on = decode(second, 2, params)
        assert (went_on["said"], went_on["scheduled"]) == (said[2], LENGTH + 7)
        # Nor does it matter what a client sends.
        for wrong in ([], {}, True, -1, "x" * 100_000):
            params = {"do_remote_prefill": True, "kvbm_peer": wrong, "remote_host": wrong, "remote_port": wrong}
            params["kvbm_block_tokens"] = [wrong, wrong]
            assert decode(second, 2, params | {"remote_num_tokens": wrong})["said"] == said[2]
        told = prefill(first, 2)
        # The first has the largest number that vLLM lets through.
        for wrong in ([(1 << 64) - BLOCK, BLOCK], [BLOCK << 40, BLOCK], [BLOCK, 0.5], "xy"):
            assert decode(second, 2, told | {"kvbm_block_tokens": wrong})["said"] == said[2], wrong
        went_on = decode(second, 4, prefill(first, 4) | {"remote_num_tokens": -1})
        assert went_on["said"] == said[4]
        # It dies, and what it told is computed here.
        told = prefill(first, 3)
        first.kill()
        went_on = decode(second, 3, told)
        assert (went_on["said"], went_on["scheduled"]) == (said[3], LENGTH + 7)
        assert is_at_rest(second)
    # Others come in their place, and all works again.
    with pair(model, role="kv_both") as (first, second):
        went_on = decode(second, 3, prefill(first, 3))
        assert (went_on["said"], went_on["scheduled"]) == (said[3], SERVED)
        assert is_at_rest(first) and is_at_rest(second)


@pytest.mark.slow
@pytest.mark.parametrize("computes", ["fp8", "auto"])
def test_engines_of_fp8_and_bfloat16_go_on_with_what_the_other_computed(model, computes):
    def of(cache: str) -> dict:
        return {"options": {"dtype": "bfloat16", "kv_cache_dtype": cache}, "peers.convert_types": True}

    other = {"fp8": "auto", "auto": "fp8"}[computes]
    with worker(model, role="kv_producer", **of(computes)) as first, worker(model, role="kv_both", **of(other)) as alone:
        with worker(model, probe(first, "peer")[1], role="kv_consumer", **of(other)) as second:
            went_on = decode(second, 0, prefill(first, 0))
            assert went_on["scheduled"] == SERVED
            prefill(alone, 0)
            assert probe(alone, "drain")
            there, here, own = (probe(engine, "first_block", prompt=prompt(0, LENGTH)) for engine in (first, second, alone))
            # Scales are 1: what was FP8 comes as it is.
            share, least = (0, 0) if computes == "fp8" else (2**-4, 2**-10)
            for layer, came in zip(there, here):
                assert all(abs(one - other) <= abs(one) * share + least for one, other in zip(layer, came))
            # What the first layer keeps goes by nothing that was rounded before. vLLM's CPU kernel rounds FP8 down.
            assert all(abs(one - other) <= abs(one) / 4 + 2**-8 for one, other in zip(own[0], here[0]))
            assert any(own[0]) and is_at_rest(first) and is_at_rest(second)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_is_lost_before_it_is_read_is_computed_or_an_error(model, said, policy):
    # What comes again after ten others is kept for no longer, and not refused either.
    small = {"blocks": 16, "eviction": "lru"}
    late = {"policy": policy, "timeout_ms": 10_000}
    with pair(model, {"peers.lease_ttl_ms": 100}, late, **small) as (first, second):

        def is_lost(went_on: dict, number: int) -> None:
            if policy == "fail":
                assert (went_on["ended"], went_on["said"]) == ("error", [])
            else:
                assert (went_on["ended"], went_on["said"]) == ("length", said[number])
                assert went_on["scheduled"] > SERVED

        # The lease is over, and the blocks are others', when they are read.
        for number in (late % 10 for late in range(LATE)):
            told = prefill(first, number)
            assert probe(second, "lease_and_wait", prompt=prompt(number, LENGTH), params=told)
            until_forgotten(first, number)
            is_lost(probe(second, "go_on"), number)
            assert second.reset()
        assert is_at_rest(second)
        # They are not there when they are asked for.
        told = prefill(first, 8)
        until_forgotten(first, 8)
        is_lost(decode(second, 8, told), 8)
        # What is there is served, and what is local needs no peer.
        went_on = decode(second, 9, prefill(first, 9))
        assert (went_on["said"], went_on["scheduled"]) == (said[9], SERVED)
        # It died after its answer.
        told = prefill(first, 7)
        first.kill()
        went_on = decode(second, 7, told)
        is_lost(went_on, 7)
        assert went_on["seconds"] < TIMEOUT_MS / 1000
        # What is local needs no peer.
        went_on = decode(second, 9, told)
        assert (went_on["said"], went_on["ended"]) == (said[9], "length")
        # An unlisted peer is never asked.
        is_lost(decode(second, 6, told | {"remote_port": 1, "kvbm_peer": "somebody"}), 6)
        # Another request is served as ever.
        assert second.generate(prompt(5, LENGTH)).said == [said[5]]
        assert is_at_rest(second)


def until_forgotten(engine: Engine, number: int) -> None:
    """Computes other prompts until nothing is left of this one."""
    for other in range(20, 220):
        engine.generate(prompt(other, LENGTH))
        engine.settle()
        if not probe(engine, "matches", prompt=prompt(number, LENGTH)):
            return
    raise AssertionError("it is still there")


@pytest.mark.slow
@pytest.mark.parametrize(("there", "here"), FORMS)
def test_engines_with_other_workers_or_block_tokens_read_each_other(model, said, there, here):
    first, second = ({"workers": workers, "block_tokens": tokens} for workers, tokens in (there, here))
    with pair(model, first, second) as (first, second):
        for number in range(3):
            told = prefill(first, number)
            assert (told["tp_size"], told["kvbm_block_tokens"]) == (there[0], [there[1]] * 2)
            went_on = decode(second, number, told)
            assert (went_on["said"], went_on["scheduled"]) == (said[number], SERVED)
        assert is_at_rest(first) and is_at_rest(second)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["hybrid", "states"])
def test_models_of_several_cache_groups_read_each_other(model, shape):
    place = models.make(model.parent / shape, shape)
    # So that steps end, and leave a state, where checkpoints are.
    options = {"max_num_batched_tokens": 16 * BLOCK}
    with Engine(place, dtype="float32", **options) as alone:
        said = [alone.generate(prompt(number, LENGTH)).said[0] for number in range(3)]
    with pair(place, options=options) as (first, second):
        for number in range(3):
            went_on = decode(second, number, prefill(first, number))
            assert (went_on["said"], went_on["scheduled"]) == (said[number], SERVED), second.logged()[-4000:]
        # It dies, and the other one computes.
        told = prefill(first, 3)
        first.kill()
        went_on = decode(second, 3, told)
        assert (went_on["ended"], went_on["scheduled"]) == ("length", LENGTH + 7)
        assert is_at_rest(second)


@pytest.mark.slow
def test_what_is_read_has_the_salt_and_the_adapter_that_it_was_computed_with(model, tmp_path):
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapters = [str(models.write_adapter(tmp_path / name, seed)) for seed, name in enumerate(("one", "other"), 1)]
    with pair(model, options=options) as (first, second):

        def ask(engine, params=None, **named):
            answer = probe(engine, "ask", prompt=prompt(0, LENGTH), params=params, **named)
            engine.settle()
            return answer

        # Of another numbering there, and the same weights.
        ask(second, adapter=adapters[1])
        assert second.reset()
        for named in ({"salt": "some"}, {"adapter": adapters[0]}, {"salt": "some", "adapter": adapters[0]}):
            computed = ask(first, PREFILL, **named)
            went_on = ask(second, computed["params"], **named)
            assert (went_on["said"], went_on["scheduled"]) == (computed["said"], SERVED), named
        # What one of them has not computed so is not read, and is right.
        told = ask(first, PREFILL, adapter=adapters[0])["params"]
        for named in ({}, {"salt": "other"}, {"salt": "other", "adapter": adapters[0]}):
            went_on = ask(second, told, **named)
            assert went_on["scheduled"] == LENGTH + 7, named
            assert went_on["said"] == ask(first, **named)["said"], named
        assert is_at_rest(first) and is_at_rest(second)


@pytest.mark.slow
@pytest.mark.parametrize(("there", "here"), [(32, 64), (64, 32)])
def test_engines_of_other_block_sizes_read_each_other(model, said, there, here):
    with pair(model, {"block_tokens": there}, {"block_tokens": here}) as (first, second):
        for number in range(3):
            told = prefill(first, number)
            assert told["kvbm_block_tokens"] == [there, there]
            went_on = decode(second, number, told)
            assert (went_on["said"], went_on["scheduled"]) == (said[number], SERVED)
            assert probe(second, "matches", prompt=prompt(number, LENGTH)) == {"host": LENGTH // here}
        # What ends within a block of either is computed from there on.
        shorter = prompt(5, LENGTH - BLOCK)
        told = probe(first, "ask", prompt=shorter, params=PREFILL, tokens=1)["params"]
        first.settle()
        went_on = probe(second, "ask", prompt=shorter, params=told)
        assert went_on["scheduled"] == SERVED + BLOCK
        # A proxy that leaves it out has the prompt computed, and nothing is wrong.
        told = prefill(first, 4)
        del told["kvbm_block_tokens"]
        assert decode(second, 4, told)["said"] == said[4]
        assert is_at_rest(first) and is_at_rest(second)
