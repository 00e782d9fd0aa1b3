"""The manager beside an engine's memory of several cache groups, here buffers of the test's."""

import ctypes
from collections.abc import Iterator

import pytest

from kvbm_rs import CacheGroup, Chain, EngineMemory, Manager, Settings
from kvbm_rs.errors import InvalidError

SLOTS = 32
FULL, WINDOW, STATE = 4096, 2048, 512
# Blocks of a window, and from one checkpoint to the next.
LOOKS_BACK, GRID = 3, 4


class Memory:
    """Slots of a cache group, each full of one number."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.bytes = ctypes.create_string_buffer(SLOTS * block_bytes)
        parts = [(ctypes.addressof(self.bytes), block_bytes, block_bytes)]
        self.adopted = EngineMemory(SLOTS, 1, parts, owner=self.bytes)

    def fill(self, slots: range, first: int) -> None:
        for at, slot in enumerate(slots):
            ctypes.memset(ctypes.addressof(self.bytes) + slot * self.block_bytes, first + at, self.block_bytes)

    def read(self, slots: range) -> list[int]:
        held = []
        for slot in slots:
            block = self.bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]
            assert len(set(block)) == 1
            held.append(block[0])
        return held


@pytest.fixture
def memories() -> list[Memory]:
    return [Memory(FULL), Memory(WINDOW), Memory(STATE)]


@pytest.fixture
def manager(memories: list[Memory]) -> Iterator[Manager]:
    settings = {"block_bytes": FULL, "host.capacity": 64 * FULL, "hybrid.checkpoint_blocks": GRID}
    full, sliding, states = memories
    groups = [CacheGroup("sliding", sliding.adopted, window=LOOKS_BACK), CacheGroup("states", states.adopted)]
    opened = Manager(Settings(settings), full.adopted, block_tokens=4, groups=groups)
    yield opened
    assert opened.close(10.0)


def chain(blocks: int) -> Chain:
    return Chain(bytes([1, at]) * 16 for at in range(blocks))


def save(manager: Manager, memories: list[Memory]) -> None:
    """Six blocks in slots 0 to 5, of which the window has the last five, and there is one state, at the end."""
    full, sliding, states = memories
    full.fill(range(6), 10)
    sliding.fill(range(6), 30)
    states.fill(range(5, 6), 55)
    slots = [(0, 0, range(6)), (1, 1, range(1, 6)), (2, 5, range(5, 6))]
    saved = manager.save_from(chain(6), slots, is_end=True).wait(10.0)
    assert saved is not None and saved.blocks == 6
    # On the grid and at the end; of states there is only the one.
    assert saved.checkpoints == {1: (2, 2), 2: (1, 1)}


def test_what_is_saved_comes_back_to_other_slots(manager: Manager, memories: list[Memory]) -> None:
    save(manager, memories)
    lease = manager.lease(chain(8), request=1)
    assert (lease.blocks, lease.by_tier) == (6, {"host": 6})
    assert [lease.wanted(group) for group in range(3)] == [(0, 6), (3, 6), (5, 6)]
    with pytest.raises(InvalidError, match="no cache group 3"):
        lease.wanted(3)
    # The engine has the first two blocks of full attention itself.
    slots = [(0, 2, range(12, 16)), (1, 3, range(13, 16)), (2, 5, range(15, 16))]
    end = manager.load_into(lease, slots).wait(10.0)
    assert end is not None and end.is_whole and end.usable == 6 and end.slots_are_free()
    full, sliding, states = memories
    assert full.read(range(10, 17)) == [0, 0, 12, 13, 14, 15, 0]
    assert sliding.read(range(12, 17)) == [0, 33, 34, 35, 0]
    assert states.read(range(14, 17)) == [0, 55, 0]
    with pytest.raises(InvalidError, match="used before"):
        manager.load_into(lease, slots)


def test_a_match_ends_where_all_groups_can_go_on(manager: Manager, memories: list[Memory]) -> None:
    save(manager, memories)
    assert manager.matches(chain(6)) == {"host": 6}
    # There is no state before the end.
    assert manager.lease(chain(6), most=5).blocks == 0
    assert manager.lease(chain(6), most=100).blocks == 6


def test_slots_that_make_no_sense_are_an_error(manager: Manager, memories: list[Memory]) -> None:
    save(manager, memories)
    with pytest.raises(InvalidError, match="cache group 1"):
        manager.load_into(manager.lease(chain(6)), [(0, 0, range(6))]).wait(10.0)
    with pytest.raises(InvalidError, match="no cache group 7"):
        manager.save_from(chain(6), [(0, 0, range(6)), (7, 0, range(6))]).wait(10.0)


def test_samples_say_of_which_group_they_are(manager: Manager, memories: list[Memory]) -> None:
    save(manager, memories)
    values = {name: values for name, _, _, values in manager.samples()}["kvbm_transfer_blocks_total"]
    saved = {labels["group"]: value for labels, value in values if labels["from"] == "device"}
    assert saved == {"full": 6.0, "sliding": 5.0, "states": 1.0}
