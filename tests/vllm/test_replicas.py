"""Data parallelism in a real server: its ranks are given one configuration, and each keeps its own blocks."""

import time
from pathlib import Path

import pytest
from connectors import LENGTH, connector, disk, host
from engine import BLOCK, prompt
from servers import Server, asked


def replicas(model: Path, settings: dict) -> Server:
    """Two ranks."""
    return Server(model, connector(settings)["kv_transfer_config"], data_parallel_size=2)


def said_by(server: Server, model: Path, rank: int) -> list[int]:
    """What a rank says to the prompt of its number."""
    answer = server.ask(asked(model, prompt(rank, LENGTH)), {"X-data-parallel-rank": str(rank)})
    return answer["choices"][0]["token_ids"]


def hits(server: Server, rank: int) -> int:
    """Tokens that came from below a rank's engine."""
    return int(server.metric("vllm:kvbm_hit_tokens_total", engine=str(rank)))


@pytest.mark.slow
def test_ranks_of_data_parallelism_keep_their_own_beside_each_other(model, said, tmp_path, shared_memory):
    tiers = host(64, **{"host.persist": str(shared_memory)}) | disk(tmp_path)
    with replicas(model, tiers) as server:
        for rank in (0, 1):
            assert said_by(server, model, rank) == said[rank]
    for place in (tmp_path, shared_memory):
        assert list(place.glob("kvbm-*.*")) and list((place / "kvbm-dp1").glob("kvbm-*.*"))
    with replicas(model, tiers) as server:
        for rank in (0, 1):
            assert said_by(server, model, rank) == said[rank]
            until = time.monotonic() + 30
            # They are read once a second.
            while hits(server, rank) != LENGTH // BLOCK * BLOCK:
                assert time.monotonic() < until, server.logged()[-4000:]
                time.sleep(0.1)
