"""The harness itself: without any of ours the engine says the same with and without its prefix cache and vLLM's own tiers."""

import pytest

from engine import BLOCK, TINY_BLOCK_BYTES, Engine, EngineError, offloading, prompt


def test_vllms_own_tiers_serve_what_the_engine_forgot(model, tmp_path):
    files = {"type": "fs", "root_dir": str(tmp_path)}
    with Engine(model, offloading(16 * TINY_BLOCK_BYTES, files)) as engine:
        cold = engine.generate(prompt(1, 10 * BLOCK + 5))
        assert cold.scheduled == 10 * BLOCK + 5 + 7
        engine.reset()
        warm = engine.generate(prompt(1, 10 * BLOCK + 5))
        assert warm.said == cold.said
        assert warm.scheduled == 5 + 7, "from the primary tier"
        engine.reset(connector=True)
        warm = engine.generate(prompt(1, 10 * BLOCK + 5))
        assert warm.said == cold.said
        assert warm.scheduled == 5 + 7, "from files"
        assert engine.generate(prompt(2, 64)).said != cold.said


def test_an_engine_that_cannot_be_opened_says_why(model):
    with pytest.raises(EngineError, match="nonsense"):
        Engine(model, offloading(16 * TINY_BLOCK_BYTES, {"type": "nonsense"}))
