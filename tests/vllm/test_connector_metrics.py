"""What `KvbmConnector` counts stands among vLLM's own metrics."""

import pytest
from connectors import LENGTH, connector, disk, host, is_at_rest, probe
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, prompt


def metric(engine: Engine, name: str, **labels: str) -> float:
    """What vLLM's registry says of it; 0 if it was not counted."""
    found = probe(engine, "metrics").get(name, [])
    (value,) = [value for having, value in found if having == labels] or [0.0]
    return value


def copied(engine: Engine, source: str, target: str) -> tuple[float, float]:
    labels = {"from": source, "to": target}
    return (
        metric(engine, "vllm:kvbm_transfer_blocks", **labels),
        metric(engine, "vllm:kvbm_transfer_bytes", **labels),
    )


def test_hits_loads_and_saves_are_among_the_engines_metrics(model, tmp_path):
    with Engine(model, **connector(host(16) | disk(tmp_path))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert is_at_rest(engine) and probe(engine, "drain")
        assert copied(engine, "device", "host") == (10, 10 * TINY_BLOCK_BYTES)
        assert metric(engine, "vllm:kvbm_hit_tokens", tier="host") == 0

        assert engine.reset()
        engine.generate(prompt(0, LENGTH))
        assert is_at_rest(engine)
        assert copied(engine, "host", "device") == (10, 10 * TINY_BLOCK_BYTES)
        assert copied(engine, "host", "disk") == (10, 10 * TINY_BLOCK_BYTES), "what was copied meanwhile"
        assert metric(engine, "vllm:kvbm_hit_tokens", tier="host") == 10 * BLOCK
        assert metric(engine, "vllm:kvbm_slots", tier="host", state="resident") == 10

        # From disk, when others have taken the room above.
        for number in range(1, 4):
            engine.generate(prompt(number, LENGTH))
        assert probe(engine, "drain") and engine.reset()
        engine.generate(prompt(0, LENGTH))
        assert is_at_rest(engine)
        assert metric(engine, "vllm:kvbm_hit_tokens", tier="disk") > 0
        assert metric(engine, "vllm:prompt_tokens_cached_by_source", source="disk") > 0


@pytest.mark.slow
def test_metrics_come_from_a_process_of_its_own(model):
    with Engine(model, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, **connector(host(64))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert engine.reset()
        engine.generate(prompt(0, LENGTH))
        # What was told after an answer comes with the next one.
        engine.generate(prompt(1, BLOCK))
        assert copied(engine, "device", "host")[0] >= 10
        assert metric(engine, "vllm:kvbm_hit_tokens", tier="host") == 10 * BLOCK
