"""`KvbmTier` in a real engine, below vLLM's own CPU tier: the same tokens, wherever the blocks are kept."""

import pytest

from engine import BLOCK, TINY_BLOCK_BYTES, Engine, EngineError, offloading, prompt

TAIL = 5
# Computed of a prompt of whose full blocks all were served, and of its answer.
REST = TAIL + 7


def tier(place, **settings) -> dict:
    return {
        "type": "KvbmTier",
        "module_path": "kvbm_rs.vllm.tier",
        "disk.capacity": "256 blocks",
        "disk.dirs": str(place / "disk"),
        "disk.keep": True,
        **settings,
    }


def below(place, chunks: int = 64, **settings) -> dict:
    return offloading(chunks * TINY_BLOCK_BYTES, tier(place, **settings))


def stats(engine) -> dict:
    """Called in the engine's process."""
    manager = engine.core.scheduler.connector.connector_scheduler.manager
    return manager.secondary_tiers[0].stats()


def forget_primary(engine) -> None:
    """Called in the engine's process: empties vLLM's CPU tier alone, which its own reset does not."""
    engine.core.scheduler.connector.connector_scheduler.manager.primary_tier.reset_cache()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path


def evict(engine: Engine) -> None:
    """Nothing is left of what was computed but in our tier."""
    assert engine.reset()
    engine.call("test_tier_engine:forget_primary")


def test_cold_hit_reset_hit_restart_hit(model, place):
    prompts = [prompt(number, 20 * BLOCK + TAIL) for number in range(3)]
    objects = {"object.url": f"file://{place}/objects", "object.keep": True}
    with Engine(model, below(place, **objects)) as engine:
        cold = engine.generate(*prompts)
        assert cold.scheduled == 3 * (20 * BLOCK + REST)
        assert engine.generate(*prompts).said == cold.said, "the engine's own prefix cache"
        for _ in range(2):
            evict(engine)
            warm = engine.generate(*prompts)
            assert warm.said == cold.said
            assert warm.scheduled == 3 * REST
        assert engine.call("test_tier_engine:stats")["loaded_blocks"] == 2 * 60
        # Of a prompt that is all full blocks a token is left.
        whole = prompts[0][: 20 * BLOCK]
        said = engine.generate(whole).said
        evict(engine)
        warm = engine.generate(whole)
        assert (warm.said, warm.scheduled) == (said, 1 + 7)
        # A prompt that begins alike.
        evict(engine)
        assert engine.generate(prompts[0][: 7 * BLOCK] + prompt(9, 50)).scheduled == 50 + 7
        # Another tenant's salt is another chain.
        assert engine.generate(prompts[0], salt="another").scheduled == 20 * BLOCK + REST
    with Engine(model, below(place)) as engine:
        warm = engine.generate(*prompts)
        assert warm.said == cold.said
        assert warm.scheduled == 3 * REST, "from disk"
        engine.settle()
        # Nothing is flushed or told.
        engine.kill()
    only_objects = tier(place, **objects) | {"disk.capacity": "none"}
    with Engine(model, offloading(64 * TINY_BLOCK_BYTES, only_objects)) as engine:
        warm = engine.generate(*prompts)
        assert warm.said == cold.said
        assert warm.scheduled == 3 * REST, "from objects, after kill -9"


def test_corruption_is_caught_and_a_reset_forgets(model, place):
    from test_tier import corrupt

    wanted = prompt(1, 20 * BLOCK + TAIL)
    # What is found here is to be found by who asks for it.
    unscrubbed = {"transfer.scrub_mib_per_second": 0}
    with Engine(model, below(place, **unscrubbed)) as engine:
        cold = engine.generate(wanted)
        evict(engine)
        corrupt(place / "disk")
        again = engine.generate(wanted)
        assert again.said == cold.said
        assert again.scheduled == cold.scheduled, "all was computed again"
        assert engine.call("test_tier_engine:stats")["failed_loads"] == 20
        evict(engine)
        assert engine.generate(wanted).scheduled == REST, "and stored again"
        # New weights, as far as the tier knows.
        assert engine.reset(connector=True)
        assert engine.call("test_tier_engine:stats")["epoch"] == 1
        again = engine.generate(wanted)
        assert again.scheduled == cold.scheduled
        assert again.said == cold.said


@pytest.mark.slow
def test_prompts_larger_than_the_primary_tier_are_served_in_part(model, place):
    wanted = prompt(1, 24 * BLOCK + TAIL)
    with Engine(model, below(place), dtype="float32") as engine:
        cold = engine.generate(wanted)
    with Engine(model, below(place, chunks=16), dtype="float32") as engine:
        warm = engine.generate(wanted)
        assert warm.said == cold.said
        assert warm.scheduled == 10 * BLOCK + REST
        # Many that are larger together.
        crowd = [prompt(number, 10 * BLOCK + TAIL) for number in range(8)]
        said = engine.generate(*crowd).said
        assert engine.reset()
        assert engine.generate(*crowd).said == said


@pytest.mark.slow
def test_a_hybrid_model_is_served_below(model, place):
    import models

    hybrid = models.make(model.parent / "hybrid", "hybrid")
    prompts = [prompt(number, 20 * BLOCK + TAIL) for number in range(3)]
    with Engine(hybrid, dtype="float32") as engine:
        said = engine.generate(*prompts).said
    with Engine(hybrid, below(place, chunks=512), dtype="float32") as engine:
        cold = engine.generate(*prompts)
        assert cold.said == said
        evict(engine)
        warm = engine.generate(*prompts)
        assert (warm.said, warm.scheduled) == (said, 3 * REST)
        engine.settle()
        engine.kill()
    with Engine(hybrid, below(place, chunks=512), dtype="float32") as engine:
        warm = engine.generate(*prompts)
        assert (warm.said, warm.scheduled) == (said, 3 * REST), "from disk, after kill -9"


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.slow
def test_it_serves_next_to_vllms_own_files(model, place, ours_first):
    wanted = prompt(1, 20 * BLOCK + TAIL)
    tiers = [tier(place), {"type": "fs", "root_dir": str(place / "fs")}]
    together = offloading(64 * TINY_BLOCK_BYTES, *(tiers if ours_first else reversed(tiers)))
    with Engine(model, together) as engine:
        cold = engine.generate(wanted)
        for _ in range(2):
            evict(engine)
            warm = engine.generate(wanted)
            assert (warm.said, warm.scheduled) == (cold.said, REST)
    # Each of them has all of it.
    for alone in tiers:
        with Engine(model, offloading(64 * TINY_BLOCK_BYTES, alone)) as engine:
            warm = engine.generate(wanted)
            assert (warm.said, warm.scheduled) == (cold.said, REST), alone["type"]


@pytest.mark.slow
def test_a_typo_is_an_error_at_start(model, place):
    with pytest.raises(EngineError, match="disk.capacity"):
        Engine(model, below(place, **{"disk.capacitty": "1GB"}))
