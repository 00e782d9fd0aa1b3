"""Two managers that read each other's host tier, beside engines' own memory."""

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_rs import Chain, EngineMemory, KvMoved, Manager, PeerLease, Settings, nixl_is_available
from kvbm_rs.errors import InvalidError, UnavailableError

SLOTS, LAYERS, BLOCK_BYTES = 16, 4, 4096


class Worker:
    def __init__(self, addresses: str = "", shared_memory: bool = True) -> None:
        self.memory = ctypes.create_string_buffer(SLOTS * BLOCK_BYTES)
        parts = [(ctypes.addressof(self.memory), BLOCK_BYTES, BLOCK_BYTES)]
        settings = {
            "block_bytes": BLOCK_BYTES,
            "host.capacity": SLOTS * BLOCK_BYTES,
            "peers.enabled": True,
            "peers.port": 0,
            "peers.lease_share": 1.0,
            "peers.shared_memory": shared_memory,
        } | ({"peers.addresses": addresses} if addresses else {})
        memory = EngineMemory(SLOTS, LAYERS, parts, owner=self.memory)
        fingerprint = {"model": "tests", "weights": "some", "block_tokens": 4}
        self.manager = Manager(Settings(settings), memory, block_tokens=4, fingerprint=fingerprint)

    def fill(self, slot: int, value: int) -> None:
        ctypes.memset(ctypes.addressof(self.memory) + slot * BLOCK_BYTES, value, BLOCK_BYTES)

    def has(self, slot: int, value: int) -> bool:
        start = slot * BLOCK_BYTES
        return self.memory.raw[start : start + BLOCK_BYTES] == bytes([value]) * BLOCK_BYTES


def chain(name: int, blocks: int) -> Chain:
    return Chain(bytes([name, at]) * 16 for at in range(blocks))


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker, str]]:
    there = Worker()
    own = there.manager.peer()
    assert own is not None
    here = Worker(own[1])
    yield there, here, own[0]
    assert here.manager.close(10.0)
    assert there.manager.close(10.0)


def compute(worker: Worker, name: int, blocks: int) -> None:
    for slot in range(blocks):
        worker.fill(slot, 16 * name + slot)
    saved = worker.manager.save_from(chain(name, blocks), [(0, 0, range(blocks))]).wait(10.0)
    assert saved is not None
    assert saved.blocks == blocks


def lease_at(here: Worker, peer: str, wanted: Chain) -> PeerLease:
    lease = here.manager.lease_at(peer, wanted).wait(10.0)
    assert lease is not None
    return lease


def test_what_a_peer_holds_is_loaded_into_slots(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    compute(there, 1, 6)
    assert name in here.manager.peers()
    lease = lease_at(here, name, chain(1, 8))
    assert (lease.peer, lease.blocks, lease.only_there) == (name, 6, 6)
    loaded = here.manager.load_into(lease, [(0, 0, range(10, 16))]).wait(10.0)
    assert loaded is not None
    assert (loaded.arrived, loaded.is_whole) == (6, True)
    assert all(here.has(10 + at, 16 + at) for at in range(6))
    # It came straight, and is here once it is saved.
    assert not here.manager.matches(chain(1, 8))
    saved = here.manager.save_from(chain(1, 6), [(0, 0, range(10, 16))]).wait(10.0)
    assert saved is not None
    assert here.manager.matches(chain(1, 8)) == {"host": 6}
    with pytest.raises(InvalidError, match="used before"):
        here.manager.pull(lease)


def test_the_page_on_peers_does_what_it_says(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    compute(there, 1, 6)
    page = (Path(__file__).parents[2] / "docs/peers.md").read_text()
    (said,) = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)
    names = {"manager": here.manager, "chain": chain(1, 6), "slots": list(range(10, 16))}
    exec(said.replace("127.0.0.1/6890", name), names)
    loaded = names["load"].wait(10.0)
    assert loaded.is_whole
    assert all(here.has(10 + at, 16 + at) for at in range(6))


def test_what_a_peer_holds_is_pulled_to_the_host_tier(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    compute(there, 1, 6)
    pulled = here.manager.pull(lease_at(here, name, chain(1, 6))).wait(10.0)
    assert pulled is not None
    assert (pulled.blocks, pulled.copied, pulled.fault) == (6, 6, None)
    assert lease_at(here, name, chain(1, 6)).only_there == 0


def test_layers_travel_before_their_blocks_are_there() -> None:
    there = Worker(shared_memory=False)
    name, address = there.manager.peer() or ("", "")
    here = Worker(address)

    def sent() -> float:
        found = {name: values for name, *_, values in there.manager.samples()}.get("kvbm_peer_blocks_total", [])
        return sum(count for of, count in found if of["direction"] == "sent")

    for number, is_finished in enumerate((True, False, True), 1):
        before = sent()
        for slot in range(6):
            there.fill(slot, 16 * number + slot)
        saving = there.manager.save_in_layers(chain(number, 6), [(0, 0, range(6))])
        load = here.manager.follow_into(name, chain(number, 6), [(0, 0, range(6))], seconds=60.0)
        for _ in range(LAYERS):
            saving.layer_is_ready()
        until = time.monotonic() + 10.0
        while sent() < before + 6:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert load.poll() is None and there.manager.matches(chain(number, 6)) == {}
        if is_finished:
            assert saving.finish() == 6
            with pytest.raises(InvalidError, match="ended before"):
                saving.layer_is_ready()
        del saving
        loaded = load.wait(10.0)
        assert loaded is not None
        assert (loaded.arrived, loaded.is_whole) == ((6, True) if is_finished else (0, False))
        assert all(here.has(at, 16 * number + at) for at in range(6)) == is_finished
    assert here.manager.close(10.0) and there.manager.close(10.0)


def test_a_save_in_layers_that_makes_no_sense_begins_nothing(workers: tuple[Worker, Worker, str]) -> None:
    there, _, _ = workers
    with pytest.raises(UnavailableError, match="from its root"):
        there.manager.save_in_layers(chain(1, 6), [(0, 3, range(3))])
    with pytest.raises(InvalidError):
        there.manager.save_in_layers(chain(1, 6), [(0, 0, [SLOTS])])
    saving = there.manager.save_in_layers(chain(1, 6), [(0, 0, range(6))])
    with pytest.raises(InvalidError, match="0 of 4 layers"):
        saving.finish()
    compute(there, 1, 6)


def test_what_a_peer_computes_is_followed(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    compute(there, 1, 3)
    pull = here.manager.follow(name, chain(1, 6), seconds=60.0)
    assert pull.wait(0.01) is None
    compute(there, 1, 6)
    pulled = pull.wait(10.0)
    assert pulled is not None
    assert (pulled.blocks, pulled.copied, pulled.fault) == (6, 6, None)
    # What is there, and no more.
    compute(there, 2, 3)
    pulled = here.manager.follow(name, chain(2, 6), seconds=0.0).wait(10.0)
    assert pulled is not None
    assert (pulled.blocks, pulled.fault) == (3, None)
    with pytest.raises(InvalidError, match="no peer somebody is known"):
        here.manager.follow("somebody", chain(1, 6), seconds=1.0).wait(10.0)


def test_what_a_peer_computes_goes_into_slots_as_it_lands(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    compute(there, 1, 3)
    load = here.manager.follow_into(name, chain(1, 6), [(0, 1, range(11, 16))], seconds=60.0)
    assert load.wait(0.01) is None
    compute(there, 1, 6)
    loaded = load.wait(10.0)
    assert loaded is not None
    assert (loaded.arrived, loaded.is_whole, loaded.usable, loaded.fault) == (5, True, 6, None)
    assert all(here.has(10 + at, 16 + at) for at in range(1, 6))
    # What does not come is told, and why.
    loaded = here.manager.follow_into("somebody", chain(2, 3), [(0, 0, range(3))], seconds=0.0).wait(10.0)
    assert loaded is not None
    assert (loaded.arrived, loaded.failed) == (0, 3)
    assert loaded.fault is not None
    assert "no peer somebody is known" in loaded.fault


def test_new_weights_that_nobody_named_are_not_shared(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    there.manager.reset()
    here.manager.reset()
    compute(there, 1, 6)
    with pytest.raises(UnavailableError, match="the same weights"):
        lease_at(here, name, chain(1, 6))
    there.manager.reset(weights="step-2")
    here.manager.reset(weights="step-2")
    compute(there, 1, 6)
    assert lease_at(here, name, chain(1, 6)).blocks == 6


def test_one_call_moves_blocks_and_calls_back(workers: tuple[Worker, Worker, str]) -> None:
    there, here, name = workers
    compute(there, 1, 6)
    done = threading.Event()
    told: list[tuple[KvMoved | None, Exception | None]] = []

    def on_done(moved: KvMoved | None, error: Exception | None) -> None:
        told.append((moved, error))
        done.set()

    def moved(source: str | range | None, destination: range | None) -> KvMoved:
        done.clear()
        transfer = here.manager.transfer_kv_cache(source, destination, chain(1, 6), on_done)
        assert done.wait(10.0)
        moved, error = told.pop()
        assert error is None
        assert moved is not None
        assert transfer.arrived == moved.blocks <= transfer.wanted == 6
        assert moved.slots_are_free()
        return moved

    assert moved(name, range(6)).blocks == 6
    assert all(here.has(at, 16 + at) for at in range(6))
    # They came straight: the tiers get them from the slots.
    assert moved(range(6), None).blocks == 6
    assert moved(None, range(10, 16)).blocks == 6
    assert all(here.has(10 + at, 16 + at) for at in range(6))
    assert moved(name, None).blocks == 6
    done.clear()
    here.manager.transfer_kv_cache("unlisted", None, chain(2, 6), on_done)
    assert done.wait(10.0)
    [(nothing, error)] = told
    assert nothing is None
    assert isinstance(error, InvalidError)


def test_nixl_is_there_if_its_library_is() -> None:
    assert not nixl_is_available("/nowhere/libnixl_capi.so")
    if "nixl" in os.environ.get("KVBM_REQUIRE", "").split(","):
        assert nixl_is_available()
