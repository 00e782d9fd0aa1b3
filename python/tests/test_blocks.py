"""Get and put, for engines that copy for themselves."""

import array
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvbm_rs import Blocks, Chain, Settings
from kvbm_rs.errors import ClosedError, InvalidError

BLOCK = 4096


def chain_of(name: int, blocks: int) -> Chain:
    return Chain([name.to_bytes(8, "big") + index.to_bytes(8, "big") for index in range(blocks)])


def bytes_of(name: int, blocks: int) -> bytearray:
    return bytearray(b"".join(bytes([name, index]) * (BLOCK // 2) for index in range(blocks)))


def open_blocks(**more: object) -> Blocks:
    return Blocks(Settings({"block_bytes": BLOCK, "host.capacity": "64 blocks", **more}))


def test_what_was_put_is_got_and_no_more() -> None:
    blocks = open_blocks()
    assert blocks.block_bytes == BLOCK
    chain, data = chain_of(1, 5), bytes_of(1, 5)
    into = bytearray(5 * BLOCK)
    assert blocks.get(chain, into) == 0
    assert blocks.put(chain, data, request=7) == 5
    assert blocks.get(chain, into, request=8) == 5
    assert into == data
    longer = chain_of(1, 6)
    assert blocks.get(longer, bytearray(6 * BLOCK)) == 5
    assert blocks.matches(longer) == {"host": 5}
    short = bytearray(2 * BLOCK)
    assert blocks.get(longer, short) == 2 and short == data[: 2 * BLOCK]
    blocks.finished(7, 100)
    assert blocks.stats()["host"]["resident"] == 5
    assert "kvbm_" in blocks.metrics()
    assert blocks.close(10)


@pytest.mark.parametrize(
    "into",
    [
        lambda data: data,
        lambda data: memoryview(data),
        lambda data: np.frombuffer(data, dtype=np.float32).reshape(3, -1),
        lambda data: array.array("d", bytes(len(data))),
        lambda data: (ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data)),
    ],
    ids=["bytearray", "memoryview", "numpy", "array", "address"],
)
def test_any_memory_will_do(into: Callable[[bytearray], object]) -> None:
    blocks = open_blocks()
    chain, data = chain_of(2, 3), bytes_of(2, 3)
    assert blocks.put(chain, into(data) if not isinstance(into(data), array.array) else data) == 3
    kept = bytearray(3 * BLOCK)
    target = into(kept)
    assert blocks.get(chain, target) == 3
    assert (target.tobytes() if isinstance(target, array.array) else bytes(kept)) == bytes(data)


class Tensor:
    """Of a framework without the buffer protocol."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self) -> object:
        return self.values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def test_a_tensor_is_taken_by_dlpack_without_a_copy() -> None:
    blocks = open_blocks()
    values = np.arange(3 * BLOCK // 2, dtype=np.int16).reshape(3, 1, -1)
    assert blocks.put(chain_of(3, 3), Tensor(values)) == 3
    into = np.zeros_like(values)
    assert blocks.get(chain_of(3, 3), Tensor(into)) == 3
    assert (into == values).all()
    with pytest.raises(InvalidError, match="not contiguous"):
        blocks.put(chain_of(4, 3), Tensor(np.zeros((BLOCK, 3), dtype=np.int8).T))


def test_what_is_no_place_for_blocks_is_refused() -> None:
    blocks = open_blocks()
    chain = chain_of(5, 2)
    assert blocks.put(chain, bytes_of(5, 2)) == 2
    with pytest.raises(InvalidError, match="read-only"):
        blocks.get(chain, bytes(2 * BLOCK))
    with pytest.raises(InvalidError, match="whole blocks"):
        blocks.get(chain, bytearray(BLOCK + 1))
    with pytest.raises(InvalidError, match="not contiguous"):
        blocks.get(chain, memoryview(bytearray(4 * BLOCK))[::2])
    with pytest.raises((TypeError, BufferError)):
        blocks.get(chain, object())
    assert blocks.put(chain, b"") == 0
    assert blocks.get(chain, bytearray(2 * BLOCK)) == 2, "and then everything works"


def test_a_reset_forgets_and_a_close_ends() -> None:
    blocks = open_blocks()
    chain = chain_of(6, 2)
    assert blocks.put(chain, bytes_of(6, 2)) == 2
    assert blocks.reset() == 1
    assert blocks.get(chain, bytearray(2 * BLOCK)) == 0
    assert blocks.put(chain, bytes_of(6, 2)) == 2
    assert blocks.close(10)
    with pytest.raises(ClosedError):
        blocks.get(chain, bytearray(2 * BLOCK))


def test_without_a_host_tier_it_says_what_to_set() -> None:
    with pytest.raises(InvalidError, match="host.capacity"):
        Blocks(Settings({"block_bytes": BLOCK}))


def test_a_disk_outlives_the_manager(tmp_path: Path) -> None:
    settings = Settings(
        {"block_bytes": BLOCK, "host.capacity": "8 blocks", "disk.capacity": "64 blocks", "disk.dirs": [tmp_path], "disk.keep": True}
    )
    # As the documentation says it: tokens of a block are those of the argument.
    fingerprint = {"model": "m", "weights": "w"}
    chain, data = chain_of(7, 6), bytes_of(7, 6)
    blocks = Blocks(settings, fingerprint=fingerprint)
    assert blocks.put(chain, data) == 6
    assert blocks.drain(30)
    assert blocks.close(30)
    del blocks
    again = Blocks(settings, fingerprint=fingerprint)
    assert again.matches(chain) == {"disk": 6}
    into = bytearray(6 * BLOCK)
    assert again.get(chain, into) == 6
    assert into == data
    with pytest.raises(InvalidError, match="mode.*model"):
        Blocks(settings, fingerprint={"mode": "m"})


def test_other_threads_go_on_while_it_copies() -> None:
    """The interpreter is released: another thread counts on while blocks of 1 MiB are copied."""
    blocks = Blocks(Settings({"block_bytes": 1 << 20, "host.capacity": "256 blocks"}))
    chain, into = chain_of(8, 200), bytearray(200 << 20)
    assert blocks.put(chain, into) == 200
    longest, turns, ended = [0.0], [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            time.sleep(0)
            longest[0] = max(longest[0], time.perf_counter() - began)
            turns[0] += 1

    def is_held_up() -> bool:
        longest[0], began = 0.0, time.perf_counter()
        assert blocks.get(chain, into) == 200
        took, seen = time.perf_counter() - began, turns[0]
        while turns[0] == seen:
            time.sleep(0)
        return longest[0] > took / 2

    counter = threading.Thread(target=count)
    counter.start()
    try:
        # One copy that does not hold it up is proof: a busy machine holds up some.
        assert (os.cpu_count() or 1) == 1 or not all(is_held_up() for _ in range(50))
    finally:
        ended.set()
        counter.join()
