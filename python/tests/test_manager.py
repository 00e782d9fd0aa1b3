"""The manager beside an engine's own memory, here a buffer of the test's."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_rs import Chain, EngineMemory, Hints, Manager, Settings
from kvbm_rs.errors import InvalidError

SLOTS, BLOCK_BYTES, HOST_BLOCKS = 16, 4096, 8


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    memory = ctypes.create_string_buffer(SLOTS * BLOCK_BYTES)
    parts = [(ctypes.addressof(memory), BLOCK_BYTES, BLOCK_BYTES)]
    settings = {
        "block_bytes": BLOCK_BYTES,
        "eviction": "lru",
        "host.capacity": HOST_BLOCKS * BLOCK_BYTES,
        "disk.capacity": 64 * BLOCK_BYTES,
        "disk.dirs": str(tmp_path),
        "flush.interval_ms": 10,
    }
    opened = Manager(Settings(settings), EngineMemory(SLOTS, 1, parts, owner=memory), block_tokens=4)
    yield opened
    assert opened.close(10.0)


def chain(name: int, blocks: int = 5) -> Chain:
    return Chain(bytes([name, at]) * 16 for at in range(blocks))


def save(manager: Manager, name: int) -> None:
    """Until it is on disk too, and others may take its room."""
    saved = manager.save_from(chain(name), [(0, 0, range(5))], hints=Hints(priority=10)).wait(10.0)
    assert saved is not None and saved.blocks == 5
    assert manager.drain(10.0)


def test_what_is_pinned_stays(manager: Manager) -> None:
    save(manager, 1)
    lease = manager.lease(chain(1), request=1, hints=Hints(tenant=3, will_not_return=True))
    manager.pin(lease, 60.0)
    with pytest.raises(InvalidError, match="used before"):
        manager.pin(lease, 60.0)
    for name in (2, 3):
        manager.save_from(chain(name), [(0, 0, range(5))]).wait(10.0)
        assert manager.drain(10.0)
    assert manager.matches(chain(1)) == {"host": 5, "disk": 5}
    manager.finished(1, 10, for_good=True)


def test_blocks_of_another_salt_are_others(manager: Manager) -> None:
    salted = [Chain((bytes([1, at]) * 16 for at in range(5)), salt=salt) for salt in (b"", b"one", b"other")]
    assert salted[0].names(0) == chain(1).names(0)
    assert len({name for one in salted for name in one.names(0)}) == 15
    assert manager.save_from(salted[1], [(0, 0, range(5))]).wait(10.0).blocks == 5
    assert [manager.matches(one).get("host", 0) for one in salted] == [0, 5, 0]


def test_a_pin_ends(manager: Manager) -> None:
    save(manager, 1)
    manager.pin(manager.lease(chain(1)), 0.05)
    time.sleep(1.0)
    save(manager, 2)
    assert manager.matches(chain(1))["host"] < 5


def test_what_is_prefetched_comes_up(manager: Manager) -> None:
    for name in (1, 2, 3):
        save(manager, name)
    assert manager.matches(chain(1))["disk"] == 5
    manager.prefetch(manager.lease(chain(1)))
    limit = time.monotonic() + 10
    while manager.matches(chain(1)).get("host") != 5 and time.monotonic() < limit:
        time.sleep(0.01)
    assert manager.matches(chain(1)) == {"host": 5, "disk": 5}


def test_events_tell_what_comes_where(manager: Manager) -> None:
    events, names = manager.events(), chain(1).names(0)
    save(manager, 1)
    told = events.take(100)
    stored = [(what, tier, name, parent) for what, tier, name, parent in told if tier == "host"]
    assert stored == [("stored", "host", name, parent) for name, parent in zip(names, [None, *names])]
    assert {tier for _, tier, _, _ in told} == {"host", "disk"}
    assert events.take(100) == []
    manager.reset()
    assert events.take(100) == [("cleared", None, None, None)]
    assert chain(1).names(3) == names[3:]


def test_samples_are_the_metrics(manager: Manager) -> None:
    save(manager, 1)
    samples = {name: (grows, values) for name, _, grows, values in manager.samples()}
    assert samples["kvbm_transfer_blocks_total"][0]
    assert ({"from": "device", "to": "host"}, 5.0) in samples["kvbm_transfer_blocks_total"][1]
    grows, values = samples["kvbm_slots"]
    assert not grows and ({"state": "resident", "tier": "host"}, 5.0) in values


def test_hints_are_what_they_say() -> None:
    assert Hints(tenant=1) == Hints(tenant=1) != Hints(tenant=2)
    with pytest.raises(OverflowError):
        Hints(priority=1000)


def test_memory_of_a_cpu_takes_no_events(manager: Manager) -> None:
    class Event:
        cuda_event = 1

    with pytest.raises(InvalidError, match="not on a GPU"):
        manager.save_from(chain(1), [(0, 0, range(5))], ready=Event())
