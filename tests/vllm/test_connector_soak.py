"""`KvbmConnector` under many requests, some of which are taken back: nothing of them is left, and memory does not grow."""

import pytest
from connectors import LENGTH, SERVED, connector, disk, host, probe
from engine import BLOCK, Engine, prompt

# What vLLM, torch and the allocator keep back and give again; a block's KV is 128 KiB, a request's state some KiB.
NOISE = 24 << 20


@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_is_left_of_many_requests(model, said, tmp_path, requests):
    # A small cache of the engine's own: each of its blocks is memory that grows when it is first used.
    few = {"num_gpu_blocks_override": 64, "max_model_len": 16 * BLOCK}
    with Engine(model, **connector(host(64) | disk(tmp_path)), **few) as engine:
        # What is made once: tiers fill, kernels of each size are warmed up.
        probe(engine, "soak", requests=requests // 2, seed=1)
        assert engine.reset()
        soaked = probe(engine, "soak", requests=requests, seed=2)
        print(soaked)
        assert soaked["aborted"] > requests // 10
        assert soaked["left"] == {"requests": 0, "loading": 0, "saving": 0, "ending": 0, "pinning": 0, "used_blocks": 1}
        memory = soaked["memory"]
        assert min(memory[-3:]) - min(memory[:3]) < NOISE, memory
        # And everything works.
        assert engine.generate(prompt(0, LENGTH)).said == [said[0]]
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
