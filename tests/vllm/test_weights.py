"""Weights that are exchanged in a running engine, as reinforcement learning does: no process serves what was computed with others."""

from pathlib import Path

import pytest
from connectors import LENGTH, SERVED, connector, disk, is_at_rest, probe
from engine import Engine, prompt
from test_tier_engine import below, evict


def objects(place: Path) -> dict:
    return {"object.url": f"file://{place}/objects", "object.keep": True, "flush.interval_ms": 10}


@pytest.mark.parametrize("tiers", [disk, pytest.param(objects, marks=pytest.mark.slow)], ids=["disk", "bucket"])
def test_what_exchanged_weights_computed_serves_no_later_process(model, said, tmp_path, tiers):
    with Engine(model, **connector(tiers(tmp_path))) as engine:
        assert engine.generate(prompt(1, LENGTH)).said == [said[1]]
        probe(engine, "exchange_weights", prompt=prompt(2, LENGTH))
        others = engine.generate(prompt(0, LENGTH))
        assert others.said != [said[0]], "else the test tells nothing"
        assert probe(engine, "drain") and engine.reset()
        # In this process the names are good.
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == (others.said, SERVED)
        assert is_at_rest(engine)
        assert probe(engine, "drain")
        engine.kill()
    with Engine(model, **connector(tiers(tmp_path))) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
        assert probe(engine, "drain")
        engine.kill()
    # And then it heals: the weights of the files are found under their names.
    with Engine(model, **connector(tiers(tmp_path))) as engine:
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)


@pytest.mark.slow
def test_unchanged_weights_are_found_after_resets_and_restarts(model, said, tmp_path):
    tiers = connector(disk(tmp_path), weights_never_change=True)
    with Engine(model, **tiers) as engine:
        engine.generate(prompt(0, LENGTH))
        assert engine.reset(connector=True)
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert probe(engine, "drain")
        engine.kill()
    with Engine(model, **tiers) as engine:
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)


def test_blocks_of_exchanged_weights_serve_no_later_process(model, said, tmp_path):
    (tmp_path / "disk").mkdir()
    # As it was made: `auto` halves it.
    arguments = {"dtype": "float32"}
    with Engine(model, below(tmp_path), **arguments) as engine:
        assert engine.generate(prompt(1, LENGTH)).said == [said[1]]
        engine.call("connector_probe:exchange_weights", prompt=prompt(2, LENGTH))
        others = engine.generate(prompt(0, LENGTH))
        assert others.said != [said[0]], "else the test tells nothing"
        evict(engine)
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == (others.said, SERVED), "in this process the names are good"
    with Engine(model, below(tmp_path), **arguments) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
    with Engine(model, below(tmp_path), **arguments) as engine:
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
