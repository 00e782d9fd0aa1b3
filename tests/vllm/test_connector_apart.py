"""`KvbmConnector` where the EngineCore is a process of its own, as it is in every server."""

import os
import signal

import pytest
from connectors import LENGTH, SERVED, connector, disk, host, probe
from engine import Engine, prompt

APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def open_apart(model, settings: dict, **arguments) -> Engine:
    return Engine(model, environment=APART, **connector(settings), **arguments)


@pytest.mark.slow
def test_a_process_of_its_own_is_served_from_below(model, said):
    with open_apart(model, host(64)) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
        hit = engine.generate(prompt(0, LENGTH))
        assert (hit.said, hit.scheduled) == ([said[0]], SERVED), "from the engine's own cache"
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED), "from the host tier"
        # Many at once, more than the tier has room for, twice.
        for _ in range(2):
            assert engine.generate(*(prompt(number, LENGTH) for number in range(10))).said == said
            assert engine.reset()
        assert engine.reset(connector=True)
        assert engine.generate(prompt(0, LENGTH)).scheduled == LENGTH + 7


@pytest.mark.slow
def test_the_next_process_finds_what_a_killed_one_left(model, said, tmp_path, shared_memory):
    tiers = host(64, **{"host.persist": str(shared_memory)}) | disk(tmp_path)
    with open_apart(model, tiers) as engine:
        engine.generate(*(prompt(number, LENGTH) for number in range(3)))
        engine.settle()
        # Its front end is killed too: vLLM's waits for ever for an EngineCore that is gone.
        os.kill(probe(engine, "core_process"), signal.SIGKILL)
        engine.kill()
    with open_apart(model, tiers) as engine:
        for number in range(3):
            warm = engine.generate(prompt(number, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[number]], SERVED)
        # And then it heals.
        assert engine.generate(prompt(3, LENGTH)).said == [said[3]]
        assert engine.reset()
        warm = engine.generate(prompt(3, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[3]], SERVED)
