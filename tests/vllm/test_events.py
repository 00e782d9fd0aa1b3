"""A manager's events as vLLM's: without an engine, on memory of the test's own."""

import ctypes
import hashlib
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvbm_rs import Chain, EngineMemory, Manager, Settings
from kvbm_rs.vllm.connector import events
from kvbm_rs.vllm.connector.events import Publisher

SLOTS, BLOCK_BYTES, TOKENS = 32, 4096, 4


@pytest.fixture
def manager():
    memory = ctypes.create_string_buffer(SLOTS * BLOCK_BYTES)
    parts = [(ctypes.addressof(memory), BLOCK_BYTES, BLOCK_BYTES)]
    settings = Settings({"host.capacity": 8 * BLOCK_BYTES, "block_bytes": BLOCK_BYTES, "eviction": "lru"})
    opened = Manager(settings, EngineMemory(SLOTS, 1, parts, owner=memory), block_tokens=TOKENS)
    yield opened
    assert opened.close(10.0)


def request(name: str, blocks: int) -> SimpleNamespace:
    """A request of an engine: its hashes are chained, its tokens are counted."""
    hashes, parent = [], b""
    for at in range(blocks):
        parent = hashlib.sha256(parent + f"{name} {at}".encode()).digest()
        hashes.append(parent)
    return SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(blocks * TOKENS)), lora_request=None)


def save(manager: Manager, asked: SimpleNamespace) -> Chain:
    chain = Chain(asked.block_hashes)
    assert manager.save_from(chain, [(0, 0, list(range(len(chain))))]).wait(10.0).blocks == len(chain)
    return chain


def names(asked: SimpleNamespace) -> list[int]:
    return [maybe_convert_block_hash(name) for name in asked.block_hashes]


def held(told: list) -> set[int]:
    """What a router that heard all of it thinks is there. A block is stored once, and removed once."""
    there = set()
    for event in told:
        assert event.medium == "CPU"
        for name in event.block_hashes:
            assert (name in there) == isinstance(event, BlockRemoved)
            (there.remove if isinstance(event, BlockRemoved) else there.add)(name)
    return there


def test_a_chain_is_one_event(manager):
    publisher, asked = Publisher(manager, TOKENS, 0), request("a", 5)
    publisher.note(asked, asked.block_hashes, Chain(asked.block_hashes), 0)
    save(manager, asked)
    (stored,) = publisher.take()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (names(asked), None)
    assert (stored.token_ids, stored.block_size) == (list(range(5 * TOKENS)), TOKENS)
    assert publisher.take() == []


def test_what_leaves_is_told_and_what_comes_back_too(manager):
    publisher, told = Publisher(manager, TOKENS, 0), []
    for name in ("a", "b", "a", "c", "a"):
        asked = request(name, 5)
        chain = Chain(asked.block_hashes)
        publisher.note(asked, asked.block_hashes, chain, 0)
        save(manager, asked)
        told += publisher.take()
        there = manager.matches(chain).get("host", 0)
        assert set(names(asked)[:there]) <= held(told)
        assert len(held(told)) == manager.occupancy()["host"][1]


def test_a_reset_removes_everything_and_it_may_come_back(manager):
    publisher, asked = Publisher(manager, TOKENS, 0), request("a", 5)
    publisher.note(asked, asked.block_hashes, Chain(asked.block_hashes), 0)
    save(manager, asked)
    manager.reset()
    told = publisher.take()
    assert not held(told)
    save(manager, asked)
    assert held(told + publisher.take()) == set(names(asked))


def test_blocks_without_tokens_are_told_when_these_are_known(manager):
    asked = request("a", 5)
    save(manager, asked)
    publisher = Publisher(manager, TOKENS, 0)
    assert publisher.take() == []
    begun = SimpleNamespace(**vars(asked) | {"block_hashes": asked.block_hashes[:2]})
    chain = Chain(begun.block_hashes)
    publisher.note(begun, begun.block_hashes, chain, 0)
    publisher.find(chain)
    assert held(publisher.take()) == set(names(asked)[:2])
    publisher.find(chain)
    assert publisher.take() == [], "once"
    chain.extend(asked.block_hashes[2:])
    publisher.note(asked, asked.block_hashes, chain, 2)
    publisher.find(chain)
    (more,) = publisher.take()
    assert (more.block_hashes, more.parent_block_hash) == (names(asked)[2:], names(asked)[1])


def test_after_lost_events_nothing_is_claimed_until_found(manager):
    publisher, asked = Publisher(manager, TOKENS, 0), request("a", 5)
    chain = Chain(asked.block_hashes)
    publisher.note(asked, asked.block_hashes, chain, 0)
    save(manager, asked)
    told = publisher.take()
    # 65,536 wait for a listener that does not read; each save brings five, and pushes five out.
    for number in range(7_000):
        save(manager, request(f"other {number}", 5))
    told += publisher.take()
    publisher.find(chain)
    told += publisher.take()
    assert len(held(told)) == manager.matches(chain).get("host", 0)


def test_what_is_remembered_is_bounded(manager, monkeypatch):
    monkeypatch.setattr(events, "_MAX_EXPECTED", 7)
    publisher = Publisher(manager, TOKENS, 0)
    for number in range(20):
        asked = request(f"never saved {number}", 5)
        publisher.note(asked, asked.block_hashes, Chain(asked.block_hashes), 0)
    assert publisher.take() == []
    assert len(publisher._expected) == 7
    assert not publisher._blocks
