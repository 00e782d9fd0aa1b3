"""HazardPolicy in vLLM's own CPU offloading manager."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import policy_replay
import pytest
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, offloading, prompt
from sources import passes_with
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvbm_rs.vllm.policy import HazardPolicy


def keys_of(chain: int, chunks: int, group: int = 0) -> list[bytes]:
    """The keys of a prompt's chunks. `chain` names the prompt."""
    return [make_offload_key(chain.to_bytes(8, "big") + index.to_bytes(8, "big") + bytes(16), group) for index in range(chunks)]


def context_of(name: str, *groups: list[bytes]) -> ReqContext:
    context = ReqContext(req_id=name)
    for keys in groups:
        for end, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 16 * end)
    return context


def manager_of(chunks: int) -> CPUOffloadingManager:
    """As vLLM makes it of the two lines of configuration."""
    return CPUOffloadingManager(chunks, "HazardPolicy", "kvbm_rs.vllm.policy")


def hits(manager: CPUOffloadingManager, keys: list[bytes]) -> int:
    context = ReqContext(req_id="look-up")
    return next((at for at, key in enumerate(keys) if manager.lookup(key, context) is not LookupResult.HIT), len(keys))


def serve(manager: CPUOffloadingManager, name: str, keys: list[bytes]) -> int:
    """A request from its look-up to its end. Returns how many chunks it found."""
    context = context_of(name, keys)
    found = policy_replay.serve(manager, keys, context)
    manager.on_request_finished(context)
    return found


def test_vllm_loads_it_by_two_lines() -> None:
    assert CachePolicyFactory.get_cache_policy_cls("HazardPolicy", "kvbm_rs.vllm.policy") is HazardPolicy
    assert isinstance(manager_of(4)._policy, HazardPolicy)


def test_an_insertion_may_say_for_which_request_it_is() -> None:
    """As by vLLM 0.33."""
    manager = manager_of(4)
    insert, context = manager._policy.insert, context_of("a", keys_of(1, 3))
    manager._policy.insert = lambda key, chunk, *_: insert(key, chunk, context)  # type: ignore[method-assign]
    assert serve(manager, "a", keys_of(1, 3)) == 0
    assert serve(manager, "b", keys_of(1, 3)) == 3


@pytest.mark.slow
def test_it_all_holds_with_the_vllm_0_33_manager() -> None:
    passes_with("0.33.0", __file__, "not engine and not published")


def test_stored_blocks_are_found_and_the_oldest_tail_leaves_first() -> None:
    manager = manager_of(6)
    old, new = keys_of(1, 3), keys_of(2, 5)
    assert serve(manager, "a", old) == 0
    assert serve(manager, "b", old) == 3
    assert serve(manager, "c", new) == 0
    assert hits(manager, new) == 5
    assert hits(manager, old) == 1, "its head is left, not its tail"


def test_a_chunk_that_is_read_or_offered_is_never_evicted() -> None:
    manager = manager_of(4)
    read = keys_of(1, 3)
    serve(manager, "a", read)
    reader = context_of("b", read)
    manager.on_new_request(reader)
    manager.prepare_load(read, reader)
    writer = context_of("c", keys_of(2, 2))
    manager.on_new_request(writer)
    assert manager.prepare_store(keys_of(2, 2), writer) is None, "there is room for one"
    assert hits(manager, read) == 3
    manager.complete_load(read, reader)
    assert manager.prepare_store(keys_of(2, 2), writer) is not None, "and then there is room"
    assert hits(manager, read) == 2


def test_a_failed_store_leaves_nothing_and_its_room_comes_back() -> None:
    manager = manager_of(4)
    keys = keys_of(1, 4)
    context = context_of("a", keys)
    manager.on_new_request(context)
    assert manager.prepare_store(keys, context) is not None
    manager.complete_store(keys[1:2], context, success=False)
    manager.complete_store([keys[0], *keys[2:]], context)
    manager.on_request_finished(context)
    assert hits(manager, keys) == 1
    assert serve(manager, "b", keys) == 1
    assert hits(manager, keys) == 4, "the gap is filled"
    assert serve(manager, "c", keys_of(2, 4)) == 0
    assert hits(manager, keys_of(2, 4)) == 4


def test_a_reset_forgets_all_and_everything_works_again() -> None:
    manager = manager_of(4)
    keys = keys_of(1, 3)
    serve(manager, "a", keys)
    running = context_of("b", keys)
    manager.on_new_request(running)
    manager.prepare_load(keys, running)
    manager.reset_cache()
    assert hits(manager, keys) == 0
    assert len(manager._policy._policy) == 0
    manager.on_request_finished(running)
    assert serve(manager, "c", keys_of(2, 4)) == 0
    assert serve(manager, "d", keys_of(2, 4)) == 4


def test_windows_of_a_hybrid_model_stay_without_their_past() -> None:
    manager = manager_of(8)
    full, window = keys_of(1, 4, group=0), keys_of(1, 4, group=1)
    context = context_of("a", full, window)
    manager.on_new_request(context)
    stored = [*full, *window[2:]]
    output = manager.prepare_store(stored, context)
    assert output is not None and output.keys_to_store == stored
    manager.complete_store(stored, context)
    manager.on_request_finished(context)
    serve(manager, "b", keys_of(2, 2))
    assert serve(manager, "c", keys_of(3, 1)) == 0
    left = [key for key in stored if manager.lookup(key, context) is LookupResult.HIT]
    assert len(left) == 5


def test_requests_leave_nothing_behind() -> None:
    manager = manager_of(50)
    for number in range(500):
        serve(manager, str(number), keys_of(number % 40, 1 + number % 7))
    policy = manager._policy
    assert len(policy._policy) == len(policy._chunks) <= 50


@pytest.mark.parametrize("seed", range(20))
def test_the_manager_and_its_policy_agree_whatever_happens(seed: int) -> None:
    """Look-ups, loads, stores, failures and resets in any order, of overlapping requests."""
    chance = random.Random(seed)
    manager = manager_of(12)
    loading: list[tuple[list[bytes], ReqContext]] = []
    storing: list[tuple[list[bytes], ReqContext]] = []
    for number in range(400):
        keys = keys_of(chance.randrange(5), 1 + chance.randrange(10))
        context = context_of(str(number), keys)
        manager.on_new_request(context)
        found = hits(manager, keys)
        if found and chance.random() < 0.7:
            manager.prepare_load(keys[:found], context)
            loading.append((keys[:found], context))
        output = manager.prepare_store(keys[found:], context)
        if output is not None and output.keys_to_store:
            storing.append((output.keys_to_store, context))
        manager.on_request_finished(context)
        while loading and chance.random() < 0.6:
            manager.complete_load(*loading.pop(chance.randrange(len(loading))))
        while storing and chance.random() < 0.6:
            manager.complete_store(*storing.pop(chance.randrange(len(storing))), success=chance.random() < 0.8)
        if chance.random() < 0.01:
            manager.reset_cache()
            loading, storing = [], []
        assert len(manager._policy._policy) == len(manager._policy._chunks) <= 12
    for ended in loading:
        manager.complete_load(*ended)
    for stored in storing:
        manager.complete_store(*stored)
    assert serve(manager, "last", keys_of(99, 12)) == 0
    assert hits(manager, keys_of(99, 12)) == 12, "all that was there could go"


# Token hit rates of `hazard` in per cent, from docs/policies.md.
PUBLISHED = {
    ("conversation", 1000): 8.59,
    ("conversation", 3000): 14.28,
    ("conversation", 5000): 18.04,
    ("conversation", 10000): 25.06,
    ("agentic", 1000): 36.93,
    ("agentic", 5000): 77.86,
    ("agentic", 10000): 91.62,
}


@pytest.fixture(scope="module")
def trace() -> Iterator[Callable[[str], list[policy_replay.Request]]]:
    traces: dict[str, list[policy_replay.Request]] = {}

    def read(name: str) -> list[policy_replay.Request]:
        path = policy_replay.TRACES / f"{name}.jsonl.gz"
        if not Path(path).exists():
            print(f"SKIPPED: {path} is not here (KVBM_TRACES says where traces are)")
            pytest.skip("no traces")
        return traces.setdefault(name, policy_replay.read_trace(path))

    yield read


slow = pytest.mark.slow


# What it costs is a figure: policy_replay.py tells it.
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("conversation", 1000),
        # Not agentic 1000, where vLLM's manager is at the limit: `policies/tests/chunk_cache.rs` has a test of it.
        *(
            pytest.param(name, chunks, marks=slow)
            for name, chunks in PUBLISHED
            if (name, chunks) not in (("conversation", 1000), ("agentic", 1000))
        ),
    ],
)
def test_it_finds_what_is_published(
    trace: Callable[[str], list[policy_replay.Request]], name: str, chunks: int
) -> None:
    requests = trace(name)
    ours = policy_replay.replay(requests, "hazard", chunks)
    assert ours.hit_rate >= PUBLISHED[name, chunks] - 0.5
    for policy in ("lru", "arc"):
        theirs = policy_replay.replay(requests, policy, chunks)
        assert ours.hit_rate > theirs.hit_rate


TWO_LINES = {"eviction_policy": "HazardPolicy", "cache_policy_module_path": "kvbm_rs.vllm.policy"}


@pytest.mark.parametrize("below", [False, pytest.param(True, marks=slow)], ids=["alone", "above files"])
def test_an_engine_says_the_same_under_pressure(model: Path, tmp_path: Path, below: bool) -> None:
    """A primary tier of 24 blocks, prompts of 10: some leave at each turn, and what is found is right."""
    tiers = [{"type": "fs", "root_dir": str(tmp_path)}] if below else []
    prompts = {number: prompt(number, 10 * BLOCK + 5) for number in range(1, 6)}
    with Engine(model, offloading(24 * TINY_BLOCK_BYTES, *tiers, **TWO_LINES)) as engine:
        cold = {number: engine.generate(tokens) for number, tokens in prompts.items()}
        scheduled = 0
        for number in (5, 1, 5, 2, 5, 3, 5, 4, 5):
            engine.reset()
            warm = engine.generate(prompts[number])
            assert warm.said == cold[number].said
            scheduled += warm.scheduled
        assert scheduled < 9 * cold[5].scheduled, "something was found"
        engine.reset(connector=True)
        assert engine.generate(prompts[5]).said == cold[5].said, "and after a reset everything works"
