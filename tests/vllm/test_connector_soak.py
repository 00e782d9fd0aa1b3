"""`KvbmConnector` under many requests, some of which are taken back: nothing of them is left, and memory does not grow."""

import pytest
from connectors import LENGTH, SERVED, connector, disk, host, probe
from engine import ANSWER_LIMIT, BLOCK, Engine, prompt

# What the allocator keeps back and gives again; a block's KV is 128 KiB, a request's state some KiB.
NOISE = 2 << 20
# Kernels are made for each shape of a step, some 300 KiB a request on a CPU without AVX-512, and kept: a thousand of them if the
# engine is left alone, which hides all that a connector could leave behind.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
# A small cache of the engine's own: each of its blocks is memory that grows when it is first used.
FEW = {"num_gpu_blocks_override": 64, "max_model_len": 16 * BLOCK}


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
