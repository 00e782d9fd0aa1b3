"""`KvbmConnector` with multi-head latent attention (DeepSeek V2), whose latent is the same in all workers: it is kept once."""

import models
import pytest
from connectors import connector, disk, is_at_rest, probe
from engine import Engine, prompt

# All that a CPU has kernels for.
BLOCK = 16
LENGTH = 10 * BLOCK + 5
BLOCK_BYTES = 2 * 576 * BLOCK * 4
# An engine on a CPU has no prefix cache of its own for it.
TWO = {"tensor_parallel_size": 2, "block_size": BLOCK, "environment": {"OMP_NUM_THREADS": "1"}}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_two_workers_of_a_stage_keep_a_latent_once_and_share_it(model, tmp_path, stages):
    latent = models.make(model.parent / "latent", "latent")
    tiers = disk(tmp_path, **{"host.capacity": 64 * BLOCK_BYTES, "disk.capacity": 256 * BLOCK_BYTES})
    asked = prompt(0, LENGTH)
    with open_engine(latent, tiers, stages) as engine:
        assert engine.generate(asked, tokens=1).scheduled == LENGTH
        before = probe(engine, "blocks_by_worker")
        assert all(one == other for one, other in zip(before[::2], before[1::2])), "they computed the same"
        assert probe(engine, "drain")
        assert is_at_rest(engine)
        assert probe(engine, "occupancy")["host"] == [64 * stages, 10]
        engine.kill()
    assert len(list(tmp_path.glob("*.blocks"))) == stages, "of the first worker of each stage"
    with open_engine(latent, tiers, stages) as engine:
        probe(engine, "watch")
        assert engine.generate(asked, tokens=1).scheduled == LENGTH % BLOCK
        assert probe(engine, "watched")["sources"] == {"disk": 10 * BLOCK}
        for again, first in zip(probe(engine, "blocks_by_worker"), before):
            # Of the last block, which is not full, bits may differ.
            assert len(set(again) & set(first)) >= 10
        assert is_at_rest(engine)


def open_engine(model, tiers: dict, stages: int) -> Engine:
    engine = Engine(model, **connector(tiers), **TWO, pipeline_parallel_size=stages)
    if stages > 1:
        probe(engine, "run_stages_once")
    return engine
