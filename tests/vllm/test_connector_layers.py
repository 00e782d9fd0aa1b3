"""`KvbmConnector` that loads what lies in memory while the engine computes, in real engines."""

import pytest
from connectors import LENGTH, SERVED, WHOLE, connector, disk, host, is_at_rest, probe, spoil
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, EngineError, prompt

LAYERS = 4


def test_what_lies_in_memory_is_loaded_while_the_engine_computes(model, said):
    with Engine(model, **connector(host(512), layerwise=True)) as engine:
        long = prompt(30, 120 * BLOCK + 5)
        for number in range(3):
            engine.generate(prompt(number, LENGTH))
        assert engine.reset()

        probe(engine, "watch")
        probe(engine, "watch_layers")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert probe(engine, "watched")["sources"] == {"host": LENGTH // BLOCK * BLOCK}
        # Each layer was waited for, once, in one step, and was there then.
        waits = probe(engine, "layer_waits")
        assert [wait["layer"] for wait in waits] == list(range(1, LAYERS + 1))
        assert all(wait["before"] <= wait["after"] >= wait["layer"] for wait in waits)

        # A step that waits for a load has something to compute: of full blocks the last.
        whole = engine.generate(WHOLE)
        assert engine.reset()
        warm = engine.generate(WHOLE)
        assert (warm.said, warm.scheduled) == (whole.said, BLOCK + 7)

        # Beside what is computed, and what is in the engine's own cache.
        mixed = engine.generate(*(prompt(number, LENGTH) for number in range(5)))
        assert mixed.said == said[:5]

        # The engine computes before anything of a slow load has come.
        cold = engine.generate(long)
        assert engine.reset()
        probe(engine, "begin_loads_late")
        probe(engine, "watch_layers")
        warm = engine.generate(long)
        assert (warm.said, warm.scheduled) == (cold.said, SERVED)
        waits = probe(engine, "layer_waits")
        assert [wait["layer"] for wait in waits] == list(range(1, LAYERS + 1))
        assert waits[0]["before"] == 0
        assert all(wait["after"] >= wait["layer"] for wait in waits)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_a_load_that_fails_amid_work_is_computed_again(model, said, shared_memory):
    # Only a request for it finds what is bad.
    tiers = host(64, **{"host.persist": str(shared_memory), "transfer.scrub_mib_per_second": 0})
    with Engine(model, **connector(tiers)) as engine:
        for number in range(4):
            engine.generate(prompt(number, LENGTH))
        assert probe(engine, "drain")
        engine.kill()
    spoil(shared_memory, every=7)
    with Engine(model, **connector(tiers, layerwise=True)) as engine:
        probe(engine, "watch_layers")
        answer = engine.generate(prompt(0, LENGTH))
        assert answer.said == [said[0]]
        assert answer.scheduled > SERVED, "from the first block on that did not come"
        assert [wait["layer"] for wait in probe(engine, "layer_waits")][:LAYERS] == list(range(1, LAYERS + 1))

        # Taken back before it is computed again: nothing that did not come is left to others.
        probe(engine, "abort_after", prompt=prompt(1, LENGTH), steps=1)
        assert engine.generate(prompt(1, LENGTH)).said == [said[1]]
        # Of two that share their blocks, the one that loads them is taken back.
        assert probe(engine, "abort_first_of_two", prompt=prompt(2, LENGTH), steps=1) == said[2]
        assert engine.generate(prompt(3, LENGTH), prompt(3, LENGTH)).said == [said[3]] * 2

        # And then it heals.
        assert is_at_rest(engine)
        assert engine.reset()
        for number in range(4):
            warm = engine.generate(prompt(number, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[number]], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_what_lies_below_memory_keeps_nobody_waiting(model, said, tmp_path):
    with Engine(model, **connector(disk(tmp_path))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
    with Engine(model, **connector(host(64) | disk(tmp_path), layerwise=True)) as engine:
        probe(engine, "watch")
        probe(engine, "watch_layers")
        for tier, waits in (("disk", 0), ("host", LAYERS)):
            warm = engine.generate(prompt(0, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
            assert tier in probe(engine, "watched")["sources"]
            assert len(probe(engine, "layer_waits")) == waits
            assert is_at_rest(engine) and engine.reset()


@pytest.mark.slow
def test_each_of_two_workers_waits_for_layers_of_its_slice(model, said, shared_memory):
    two = {"tensor_parallel_size": 2, "environment": {"OMP_NUM_THREADS": "1"}}
    tiers = host(64, **{"host.persist": str(shared_memory), "transfer.scrub_mib_per_second": 0})
    with Engine(model, **connector(tiers, layerwise=True), **two) as engine:
        for number in range(3):
            assert engine.generate(prompt(number, LENGTH)).said == [said[number]]
        assert engine.reset()
        probe(engine, "watch")
        probe(engine, "watch_layers")
        for number in range(3):
            warm = engine.generate(prompt(number, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[number]], SERVED)
        assert probe(engine, "watched")["sources"] == {"host": 3 * (LENGTH // BLOCK * BLOCK)}
        for waits in probe(engine, "layer_waits_by_worker"):
            assert [wait["layer"] for wait in waits] == list(range(1, LAYERS + 1)) * 3
            assert all(wait["before"] <= wait["after"] >= wait["layer"] for wait in waits)
        assert is_at_rest(engine)
        assert probe(engine, "drain")
        engine.kill()
    # What one worker cannot give back is lacking in both, and is computed again.
    (slots,) = [file for file in shared_memory.rglob("*rank1of2*") if file.stat().st_size >= 64 * TINY_BLOCK_BYTES // 2]
    spoil(slots, every=3, block_bytes=TINY_BLOCK_BYTES // 2)
    with Engine(model, **connector(tiers, layerwise=True), **two) as engine:
        for number in range(3):
            again = engine.generate(prompt(number, LENGTH))
            assert again.said == [said[number]]
            assert again.scheduled > SERVED
        # And then it heals.
        assert engine.reset()
        for number in range(3):
            warm = engine.generate(prompt(number, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[number]], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_layers_of_stages_are_not_waited_for(model):
    with pytest.raises(EngineError, match="layerwise is for steps that follow each other"):
        Engine(model, **connector(host(64), layerwise=True), pipeline_parallel_size=2)
