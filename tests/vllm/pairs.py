"""Two engines without a model, one of which reads at the other."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from connectors import connector
from engine import prompt
from modelless import BLOCK, BLOCK_BYTES, LONGEST, Modelless
from vllm.v1.request import Request

from kvbm_rs import Chain

BLOCKS = 12
LENGTH = BLOCKS * BLOCK + 5
LIMIT = 60.0


class Worker:
    """An engine that serves its peers, and reads at these."""

    def __init__(
        self,
        *peers: str,
        policy: str = "recompute",
        timeout_ms: int = 60_000,
        step_tokens: int = LONGEST,
        host_blocks: int = 64,
        layerwise: bool = False,
        **settings: Any,
    ) -> None:
        tiers = {"host.capacity": host_blocks * BLOCK_BYTES, "peers.enabled": True, "peers.port": 0, "peers.lease_share": 1.0}
        tiers |= settings | ({"peers.addresses": ",".join(peers)} if peers else {})
        extra = {"weights": "made up", "peer_timeout_ms": timeout_ms, "layerwise": layerwise}
        told = connector(tiers, policy, **extra)["kv_transfer_config"]
        self.engine = Modelless(told, blocks=64, requests=8, max_num_batched_tokens=step_tokens)
        self.scheduler = self.engine.scheduler.connector._scheduler
        self.manager = self.scheduler.manager
        (self.tensors,) = self.engine._worker._worker._tensors

    def step_until(self, is_so: Callable[[], bool]) -> dict[str, int]:
        """Returns how many tokens of each request were computed."""
        until, computed = time.monotonic() + LIMIT, Counter()
        while not is_so():
            assert time.monotonic() < until
            computed.update(self.engine.step().num_scheduled_tokens)
        return computed

    def compute(self, number: int, blocks: int) -> torch.Tensor:
        """Computes and keeps the leading blocks of a prompt, and returns them."""
        for tensor in self.tensors:
            tensor.copy_(torch.randint(1, 100, tensor.shape))
        request = self.engine.add("computed", prompt(number, blocks * BLOCK + 1), tokens=2)
        self.engine.step()
        computed = self.blocks_of(request, blocks)
        self.step_until(request.is_finished)
        self.step_until(lambda: not self.scheduler.is_saving())
        return computed

    def ask(self, number: int, peer: "Worker") -> Request:
        """As a proxy does when the peer has answered, which says that it has all of the prompt."""
        params = {"do_remote_prefill": True, "kvbm_peer": peer.manager.peer()[0], "remote_num_tokens": LENGTH}
        return self.engine.add("asked", prompt(number, LENGTH), tokens=1, params=params)

    def blocks_of(self, request: Request, blocks: int) -> torch.Tensor:
        (table,) = self.engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return torch.stack([tensor[table[:blocks]] for tensor in self.tensors])

    def count(self, metric: str, **labels: str) -> int:
        found = {name: values for name, _, _, values in self.manager.samples()}.get(metric, ())
        return int(sum(value for of, value in found if labels.items() <= of.items()))

    def held(self, request: Request) -> dict[str, int]:
        return self.manager.matches(Chain(request.block_hashes[:BLOCKS]))

    def is_at_rest(self) -> bool:
        self.step_until(lambda: not self.scheduler.is_saving() and not self.scheduler._loading)
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not self.scheduler._requests


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


@contextmanager
def pair(there: dict[str, Any] | None = None, **options) -> Iterator[tuple[Worker, Worker]]:
    there = Worker(**(there or {}))
    here = Worker(there.manager.peer()[1], **options)
    yield there, here
    assert there.is_at_rest() and here.is_at_rest()
    here.engine.close()
    there.engine.close()
