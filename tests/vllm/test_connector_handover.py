"""What one engine has computed comes straight into another one's blocks: two engines without a model, and what their tiers hold."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from connectors import connector
from engine import prompt
from modelless import BLOCK, BLOCK_BYTES, Modelless
from vllm.v1.request import Request, RequestStatus

from kvbm_rs import Chain

BLOCKS = 12
LENGTH = BLOCKS * BLOCK + 5
LIMIT = 60.0


class Worker:
    """An engine that serves its peers, and reads at these."""

    def __init__(self, *peers: str, policy: str = "recompute", timeout_ms: int = 60_000) -> None:
        tiers = {"host.capacity": 64 * BLOCK_BYTES, "peers.enabled": True, "peers.port": 0, "peers.lease_share": 1.0}
        tiers |= {"peers.addresses": ",".join(peers)} if peers else {}
        told = connector(tiers, policy, weights="made up", peer_timeout_ms=timeout_ms)["kv_transfer_config"]
        self.engine = Modelless(told, blocks=64, requests=8)
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

    def held(self, request: Request) -> dict[str, int]:
        return self.manager.matches(Chain(request.block_hashes[:BLOCKS]))

    def is_at_rest(self) -> bool:
        self.step_until(lambda: not self.scheduler.is_saving() and not self.scheduler._loading)
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not self.scheduler._requests


@contextmanager
def pair(**options) -> Iterator[tuple[Worker, Worker]]:
    there = Worker()
    here = Worker(there.manager.peer()[1], **options)
    yield there, here
    assert there.is_at_rest() and here.is_at_rest()
    here.engine.close()
    there.engine.close()


def comes(here: Worker, number: int, there: Worker, blocks: int = BLOCKS) -> None:
    """The leading blocks of a prompt come as they are at the peer, and nothing but the others is computed."""
    computed = there.compute(number, blocks)
    request = here.ask(number, there)
    here.engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS, "it waits for a look-up"
    assert here.step_until(request.is_finished)["asked"] == LENGTH - blocks * BLOCK
    assert here.held(request)["host"] >= blocks
    here.step_until(lambda: not here.scheduler.is_saving())


def test_a_prompt_that_was_computed_comes_without_a_look_up():
    with pair() as (there, here):
        comes(here, 1, there)
        samples = {name: values for name, _, _, values in here.manager.samples()}
        counted = [sum(value for _, value in samples[f"kvbm_{name}_tokens_total"]) for name in ("requested", "hit")]
        assert counted == [BLOCKS * BLOCK] * 2, "it is one request, and a hit"


def test_its_bytes_are_those_that_were_computed():
    with pair() as (there, here):
        computed = there.compute(1, BLOCKS)
        request = here.ask(1, there)
        here.engine.step()
        (table,) = here.engine.scheduler.kv_cache_manager.get_block_ids("asked")
        here.step_until(request.is_finished)
        came = torch.stack([tensor[table[:BLOCKS]] for tensor in here.tensors])
        assert torch.equal(came, computed)


def test_what_the_peer_lacks_is_computed():
    with pair() as (there, here):
        comes(here, 1, there, blocks=5)
        # It goes on where that was kept.
        comes(here, 2, there)


def test_what_is_here_needs_no_peer():
    with pair() as (there, here):
        there.compute(1, BLOCKS)
        here.compute(1, BLOCKS)
        here.engine.scheduler.kv_cache_manager.reset_prefix_cache()
        request = here.ask(1, there)
        here.step_until(request.is_finished)
        leases = {name: values for name, _, _, values in here.manager.samples()}["kvbm_peer_leases_total"]
        assert not sum(value for labels, value in leases if labels["direction"] == "in")


def test_a_request_that_is_taken_back_amid_it_leaves_nothing():
    with pair(policy="fail") as (there, here):
        # It has half of the prompt, and the rest is waited for.
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(lambda: here.held(request).get("host") == BLOCKS // 2)
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        here.engine.finish("asked")
        assert here.is_at_rest()
        comes(here, 2, there)


def test_what_does_not_come_in_time_is_an_error():
    with pair(policy="fail", timeout_ms=100) as (there, here):
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(request.is_finished)
        assert request.status == RequestStatus.FINISHED_ERROR
    with pair(policy="fail") as (there, here):
        comes(here, 1, there)


def test_the_time_for_room_in_the_engine_does_not_count():
    with pair(policy="fail", timeout_ms=30_000) as (there, here):
        there.compute(1, BLOCKS // 2)
        here.engine.add("other", prompt(3, 56 * BLOCK))
        here.engine.step()
        request = here.ask(1, there)
        here.engine.step()
        assert request.status == RequestStatus.WAITING, "there is room"
        here.scheduler._requests["asked"].prefilled.started -= 60
        here.engine.finish("other")
        # The rest is waited for.
        here.step_until(lambda: here.held(request).get("host") == BLOCKS // 2)
        there.compute(1, BLOCKS)
        here.step_until(request.is_finished)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


def test_what_came_before_a_reset_is_computed_again():
    with pair() as (there, here):
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(lambda: here.held(request).get("host") == BLOCKS // 2)
        assert here.scheduler.reset()
        assert here.step_until(request.is_finished)["asked"] == LENGTH


def test_a_reset_amid_it_leaves_nothing():
    with pair(policy="fail") as (there, here):
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(lambda: here.held(request).get("host") == BLOCKS // 2)
        assert here.scheduler.reset()
        here.step_until(request.is_finished)
        assert request.status == RequestStatus.FINISHED_ERROR


def test_what_is_not_computed_yet_holds_no_blocks():
    with pair() as (there, here):
        there.compute(1, BLOCKS // 2)
        params = {"remote_prefiller": {"kvbm_peer": there.manager.peer()[0]}}
        request = here.engine.add("asked", prompt(1, LENGTH), tokens=1, params=params)
        here.engine.step()
        assert request.status == RequestStatus.WAITING
        there.compute(1, BLOCKS)
        assert here.step_until(request.is_finished)["asked"] == LENGTH - BLOCKS * BLOCK
