"""`KvbmConnector` under many requests, some of which are taken back: nothing of them is left, and memory does not grow."""

import pytest
from connectors import LENGTH, SERVED, connector, disk, host, is_at_rest, probe
from engine import ANSWER_LIMIT, BLOCK, Engine, prompt

# What the allocator keeps back and gives again; a block's KV is 128 KiB, a request's state some KiB.
NOISE = 2 << 20
# Kernels are made for each shape of a step, some 300 KiB a request on a CPU without AVX-512, and kept: a thousand of them if the
# engine is left alone, which hides all that a connector could leave behind.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
# A small cache of the engine's own: each of its blocks is memory that grows when it is first used.
FEW = {"num_gpu_blocks_override": 64, "max_model_len": 16 * BLOCK}

EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
# Ten prompts whose answers take more room than the engine has for those that run at once.
ASKED, TOKENS = [prompt(number, LENGTH) for number in range(10)], 3 * BLOCK


def soaked(engine: Engine, requests: int) -> dict:
    # A second for each is plenty, on a busy machine too.
    limit = max(requests, ANSWER_LIMIT)
    # What is made once: tiers fill, kernels of each size are warmed up.
    probe(engine, "soak", limit=limit, requests=requests // 2, seed=1)
    assert engine.reset()
    return probe(engine, "soak", limit=limit, requests=requests, seed=2)


def growth(memory: list[int]) -> int:
    """Behind the first quarter: until then tiers come to use all of their memory, the more of it at a time the busier the machine."""
    return min(memory[-3:]) - min(memory[2:5])


@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_is_left_of_many_requests(model, said, tmp_path, requests):
    # The kernels of the other engine, too.
    with Engine(model, environment=FEW_KERNELS, dtype="float32", **FEW) as engine:
        alone = soaked(engine, requests)
    with Engine(model, environment=FEW_KERNELS, **connector(host(64) | disk(tmp_path)), **FEW) as engine:
        served = soaked(engine, requests)
        print(alone, served)
        assert served["aborted"] > requests // 10
        assert served["left"] == {"requests": 0, "loading": 0, "saving": 0, "ending": 0, "pinning": 0, "used_blocks": 1}
        assert growth(served["memory"]) < growth(alone["memory"]) + NOISE, (served["memory"], alone["memory"])
        # And everything works.
        assert engine.generate(prompt(0, LENGTH)).said == [said[0]]
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    """What an engine without connector says to `ASKED`."""
    with Engine(model, dtype="float32") as engine:
        return engine.generate(*ASKED, tokens=TOKENS).said


@pytest.mark.parametrize(
    "is_async", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["asynchronous", "each step awaited"]
)
def test_all_of_it_on_under_pressure_says_the_same(model, alone, tmp_path, is_async):
    """Layers awaited one by one, hits computed again, events, chunks of prompts, and room in memory for a few prompts alone."""
    few = {"num_gpu_blocks_override": 60, "max_model_len": 16 * BLOCK, "max_num_batched_tokens": 6 * BLOCK}
    tiers = host(48, **{"transfer.shadow_share": 0.5}) | disk(tmp_path)
    options = few | connector(tiers, layerwise=True) | EVENTS
    with Engine(model, async_scheduling=is_async, **options) as engine:
        probe(engine, "watch")
        probe(engine, "watch_layers")
        for _ in range(2):
            assert engine.generate(*ASKED, tokens=TOKENS).said == alone
        assert probe(engine, "watched")["preempted"]
        assert is_at_rest(engine) and engine.reset()
        # Alone, and those first that are still in memory.
        for one, said in reversed(list(zip(ASKED, alone, strict=True))):
            assert engine.generate(one, tokens=TOKENS).said == [said]
        assert is_at_rest(engine)
        assert {*probe(engine, "watched")["sources"]} == {"host", "disk"}
        assert probe(engine, "layer_waits")
        assert {*probe(engine, "shadowed")} == {"same"}
