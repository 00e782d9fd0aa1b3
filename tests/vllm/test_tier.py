"""`KvbmTier` below vLLM's `TieringOffloadingManager`: every byte is right, and a bad day costs time, not correctness."""

import contextlib
import gc
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

from kvbm_rs.errors import InvalidError, SettingsError, UnavailableError
from offloading import PAGE, Offloading, chain
from sources import passes_with

ROW = 4 * PAGE


def tier(place: Path | None = None, **settings) -> dict:
    """A tier on disk, if there is a directory, that keeps what it has."""
    on_disk = {"disk.capacity": "512 blocks", "disk.dirs": str(place), "disk.keep": True} if place else {}
    return {
        "type": "KvbmTier",
        "module_path": "kvbm_rs.vllm.tier",
        "host.staging_blocks": 16,
        "host.huge_pages": False,
        "weights": "made up",
        # What a test spoils, its loads are to find.
        "transfer.scrub_mib_per_second": 0,
        **on_disk,
        **settings,
    }


@pytest.fixture
def below(tmp_path):
    with Offloading(tier(tmp_path), row=ROW) as below:
        yield below


@pytest.mark.slow
def test_it_all_holds_with_the_vllm_0_33_manager() -> None:
    passes_with("0.33.0", __file__)


def test_what_left_the_primary_tier_comes_back(below):
    keys = chain(1, 40)
    below.save(keys)
    assert below.tier.stats()["stored_blocks"] == 40
    below.forget_primary()
    assert below.serves(keys) == 40
    assert below.tier.stats()["loaded_blocks"] == 40
    # It is in the primary tier again.
    assert below.serves(keys) == 40
    assert below.tier.stats()["loaded_blocks"] == 40
    assert below.serves(chain(2, 4)) == 0
    # A prompt that begins alike.
    assert below.serves(keys[:7] + chain(3, 5)) == 7
    assert below.tier.stats()["requests"] == 0, "nothing is kept of requests that ended"


def test_stores_come_in_any_order(below):
    keys = chain(1, 30)
    request = below.begin(keys)
    shuffled = keys[:]
    random.Random(7).shuffle(shuffled)
    below.store(request, shuffled)
    below.settle()
    below.end(request)
    assert below.tier.stats()["orphan_blocks"] == 0
    below.forget_primary()
    assert below.serves(keys) == 30


def test_chunks_of_a_prefill_are_stored_one_by_one(below):
    keys = chain(1, 30)
    request = below.begin(keys)
    # None is waited for.
    for first in range(0, 30, 5):
        below.store(request, keys[first : first + 5])
        below.step()
    below.settle()
    below.end(request)
    below.forget_primary()
    assert below.serves(keys) == 30


def test_a_prefix_in_the_primary_tier_is_not_reloaded(below):
    keys = chain(1, 20)
    below.save(keys)
    below.forget_primary()
    assert below.serves(keys[:8]) == 8
    assert below.serves(keys) == 20
    assert below.tier.stats()["loaded_blocks"] == 20


def test_keys_are_asked_for_in_any_order_and_by_copies(below):
    keys = chain(1, 8)
    below.save(keys[:5])
    request = below.begin(keys)
    right = {key: LookupResult.HIT if key in keys[:5] else LookupResult.MISS for key in keys + chain(2, 2)}
    shuffled = list(right)
    random.Random(7).shuffle(shuffled)
    copies = [bytes(bytearray(key)) for key in keys]
    for asked in (keys, keys[::-1], shuffled, keys[3:], keys[:3] + keys[1:6] + keys, copies, chain(2, 2) + keys):
        assert [below.tier.lookup(key, request) for key in asked] == [right[key] for key in asked]
    below.end(request)


def test_holes_in_the_primary_tier_are_filled(below):
    keys = chain(1, 20)
    below.save(keys)
    primary = below.manager.primary_tier
    below.forget_primary()
    assert below.serves(keys) == 20
    # Every third leaves it.
    for key in keys[::3]:
        chunk = primary._policy.get(key)
        primary._policy.remove(key)
        primary._free_chunk(chunk)
        primary._num_evictable_cache_chunks -= 1
    assert below.serves(keys) == 20
    assert below.tier.stats()["loaded_blocks"] == 20 + 7


def test_the_next_process_finds_it(tmp_path):
    keys = chain(1, 25)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys)
    with Offloading(tier(tmp_path), row=ROW) as below:
        assert below.tier.stats()["recovered_blocks"] == 25
        assert below.serves(keys) == 25


@pytest.mark.parametrize("other", [{"weights": "others"}, {"model": "another"}])
def test_other_weights_find_nothing(tmp_path, other):
    keys = chain(1, 10)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys)
    weights = {name: value for name, value in other.items() if name == "weights"}
    with Offloading(tier(tmp_path, **weights), row=ROW, model=other.get("model", "made-up")) as below:
        assert below.serves(keys) == 0


def test_objects_are_shared(tmp_path):
    keys = chain(1, 12)
    objects = tier(**{"object.url": f"file://{tmp_path}/objects", "object.keep": True})
    with Offloading(objects, row=ROW) as below:
        below.save(keys)
    with Offloading(objects, row=ROW) as below:
        assert below.serves(keys) == 12


def test_memory_below_the_primary_tier(tmp_path):
    keys = chain(1, 20)
    with Offloading(tier(**{"host.capacity": "64 blocks"}), row=ROW) as below:
        below.save(keys)
        below.forget_primary()
        assert below.serves(keys) == 20


def corrupt(place: Path) -> None:
    """Changes a bit in the middle of every page of the slot files."""
    files = [path for path in place.iterdir() if path.stat().st_size > 8 * PAGE]
    assert files
    for path in files:
        with open(path, "r+b") as file:
            for page in range(0, path.stat().st_size, PAGE):
                file.seek(page + 100)
                byte = file.read(1)
                if byte:
                    file.seek(page + 100)
                    file.write(bytes([byte[0] ^ 0x10]))


def test_corruption_is_a_miss_and_then_it_heals(tmp_path):
    keys = chain(1, 10)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys)
        below.forget_primary()
        corrupt(tmp_path)
        assert below.serves(keys) == 0
        assert below.tier.stats()["failed_loads"] == 10
        # It is computed again, stored again, and served.
        below.save(keys)
        below.forget_primary()
        assert below.serves(keys) == 10


def test_what_comes_before_a_bad_chunk_is_served(tmp_path):
    keys = chain(1, 10)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys[:6])
        corrupt_after = {path: path.read_bytes() for path in tmp_path.iterdir() if path.stat().st_size > 8 * PAGE}
        below.save(keys)
        below.forget_primary()
        # The later chunks lose their bytes: on disk is what was there before them.
        for path, before in corrupt_after.items():
            path.open("r+b").write(before)
        assert below.serves(keys) == 6
        below.save(keys)
        below.forget_primary()
        assert below.serves(keys) == 10


def test_a_failed_load_is_a_miss_for_its_request(below):
    keys = chain(1, 8)
    below.save(keys)
    below.forget_primary()
    request = below.begin(keys)
    hits, is_deferred = below.look_up_once(request, keys)
    assert (hits, is_deferred) == (8, True)
    # What was promised is gone when it is loaded, and seems to be there again after.
    native = below.tier._tier
    native.drain(60.0, bytes(16))
    below.settle()
    assert below.look_up(request, keys) == 0
    below.end(request)


def test_a_reset_of_vllms_caches_forgets(tmp_path):
    keys = chain(1, 10)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys)
        below.reset()
        assert below.serves(keys) == 0
        assert below.tier.stats()["epoch"] == 1
        below.save(keys)
        below.forget_primary()
        assert below.serves(keys) == 10
    # Which weights these were only that process knew: the next one has those of its files.
    with Offloading(tier(tmp_path), row=ROW) as below:
        assert below.serves(keys) == 0
        below.save(keys)
    # And then it heals.
    with Offloading(tier(tmp_path), row=ROW) as below:
        assert below.serves(keys) == 10


def test_a_request_waiting_through_a_reset_gets_new_names(tmp_path):
    keys, others = chain(1, 10), chain(2, 5)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys)
        waiting = below.begin(keys)
        assert below.look_up_once(waiting, keys)[0] == 10
        below.reset()
        assert below.look_up(waiting, keys) == 0
        below.store(waiting, keys)
        below.settle()
        below.end(waiting)
        below.save(others)
        below.forget_primary()
        assert (below.serves(keys), below.serves(others)) == (10, 5)
        assert below.tier.stats()["requests"] == 0


def test_replicas_share_one_configuration(tmp_path):
    """As with data parallelism: each keeps its own, and finds it again."""
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvbm-test-"))
    try:
        shared = tier(tmp_path, **{"host.capacity": "16 blocks", "host.persist": str(memory)})
        keys = [chain(number, 10) for number in range(3)]
        with contextlib.ExitStack() as running:
            # The last one comes first.
            for number in (2, 0, 1):
                replica = running.enter_context(Offloading(shared, row=ROW, replica=number))
                replica.save(keys[number])
                replica.forget_primary()
                assert [replica.serves(asked) for asked in keys] == [10 * (asked is keys[number]) for asked in keys]
        # One alone has what it always had: the places that are named.
        with Offloading(shared, row=ROW) as below:
            assert [below.serves(asked) for asked in keys] == [10, 0, 0]
        with Offloading(shared, row=ROW, replica=2) as below:
            assert [below.serves(asked) for asked in keys] == [0, 0, 10]
    finally:
        shutil.rmtree(memory)


def test_a_reset_does_not_wait_for_a_medium_that_hangs(below, monkeypatch):
    """vLLM must not give the memory of copies under way to others, so its reset fails."""
    keys = chain(1, 10)
    below.save(keys)
    native = below.tier._tier
    waited = []

    class Hanging:
        def drain(self, seconds, forget):
            waited.append(seconds)
            return 3, None

        def __getattr__(self, name):
            return getattr(native, name)

    monkeypatch.setattr(below.tier, "_tier", Hanging())
    with pytest.raises(UnavailableError, match="3 copies have not ended in 60 s.*repeat the reset"):
        below.reset()
    assert waited == [60.0]
    # What vLLM has in its own tier is served as before.
    assert below.serves(keys) == 10
    monkeypatch.undo()
    below.reset()
    assert below.serves(keys) == 0


def test_weights_that_never_change_outlive_a_reset(tmp_path):
    keys = chain(1, 10)
    with Offloading(tier(tmp_path, weights_never_change=True), row=ROW) as below:
        below.save(keys)
        below.reset()
        assert below.serves(keys) == 10
        assert below.tier.stats()["epoch"] == 0


def test_a_prefix_beyond_the_primary_tier_is_served_in_part(tmp_path):
    keys = chain(1, 48)
    with Offloading(tier(tmp_path), row=ROW) as below:
        below.save(keys)
    with Offloading(tier(tmp_path), row=ROW, chunks=16) as below:
        # All but an eighth.
        assert below.serves(keys) == 14
        assert below.tier.stats()["loaded_blocks"] == 14


def test_requests_that_wait_together_do_not_push_each_other_out(tmp_path):
    chains = [chain(number, 12) for number in range(4)]
    with Offloading(tier(tmp_path), row=ROW) as below:
        for keys in chains:
            below.save(keys)
    with Offloading(tier(tmp_path), row=ROW, chunks=16) as below:
        waiting = [(below.begin(keys), keys) for keys in chains]
        for _ in range(200):
            for request, keys in waiting[:]:
                hits, is_deferred = below.look_up_once(request, keys)
                if not is_deferred:
                    assert below.wrong(request, keys[:hits]) == []
                    waiting.remove((request, keys))
                    below.step(request)
                    below.end(request)
            below.step()
            time.sleep(0.001)
        assert waiting == []
        assert 12 <= below.tier.stats()["loaded_blocks"] <= 48


def test_cache_groups_do_not_mix(tmp_path):
    full, window = chain(1, 16, group=0), chain(1, 16, group=1)
    with Offloading(tier(tmp_path), row=ROW, groups=2) as below:
        request = below.begin(full, window)
        below.store(request, full)
        # Of the window only the end is left.
        below.store(request, window[-4:])
        below.settle()
        below.end(request)
        below.forget_primary()
        request = below.begin(full, window)
        assert below.look_up(request, full) == 16
        assert below.wrong(request, full) == []
        assert below.look_up(request, window[-4:]) == 4
        assert below.wrong(request, window[-4:]) == []
        assert below.manager.lookup(window[0], request) is LookupResult.MISS
        below.end(request)


def test_beginnings_that_are_missing_are_asked_for(below):
    """vLLM offers a chunk once. Where its beginning is lost below, whole requests are offered again."""
    keys = chain(1, 12)
    below.save(keys[:6])
    below.tier._tier.drain(60.0, bytes(16))
    begin = lambda: below.tier.on_new_request(below.begin()).policy
    assert begin() is OffloadPolicy.CHUNK_LEVEL
    below.save(keys[:6] + keys[6:])
    assert below.tier.stats()["orphan_blocks"] == 6
    assert begin() is OffloadPolicy.REQUEST_LEVEL
    # The engine then offers all, and those in the primary tier are stored from there.
    below.save(keys)
    below.forget_primary()
    assert below.serves(keys) == 12
    for number in range(64):
        below.save(chain(100 + number, 1))
    assert begin() is OffloadPolicy.CHUNK_LEVEL


def test_a_shutdown_leaves_nothing_behind(tmp_path):
    threads = set(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        with Offloading(tier(tmp_path), row=ROW) as below:
            region = below.manager.primary_tier._mmap_region
            below.save(chain(number, 20))
            # Some requests are never ended.
            waiting = below.begin(chain(number, 20))
            below.forget_primary()
            below.look_up_once(waiting, chain(number, 20))
        gc.collect()
        assert region.mmap_obj is None
        assert not os.path.exists(region.mmap_path)
        assert "vllm_offload" not in Path("/proc/self/maps").read_text()
    deadline = time.monotonic() + 10
    while set(os.listdir("/proc/self/task")) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(os.listdir("/proc/self/task")) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_settings_are_checked_at_start(tmp_path):
    for wrong, error, words in [
        ({"disk.capcity": "1GB"}, SettingsError, "disk.capacity"),
        ({"disk": {"dir": str(tmp_path)}}, SettingsError, "disk.dirs"),
        ({"disk.capacity": "many"}, SettingsError, "many"),
        ({"block_bytes": 4096}, InvalidError, "leave it out"),
        ({"weights_never_change": "no"}, InvalidError, "weights_never_change"),
        ({"disk.capacity": "0"}, InvalidError, "host.capacity"),
    ]:
        with pytest.raises(error, match=words):
            Offloading(tier(tmp_path, **wrong), row=ROW)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_told_are_to_be_named(tmp_path):
    with pytest.raises(InvalidError, match="which weights somebody/something has"):
        Offloading(tier(tmp_path, weights=None), row=ROW, model="somebody/something")


def test_the_scheduler_does_not_wait_for_a_medium(tmp_path):
    """Look-ups and submissions of 512 chunks of 1 MiB take milliseconds, whatever the disk does."""
    keys = chain(1, 256)
    with Offloading(tier(tmp_path), row=1 << 20, chunks=300) as below:
        request = below.begin(keys)
        stored = below.manager.prepare_store(keys, request)
        began = time.thread_time()
        below.manager.complete_store(set(keys), request)
        assert time.thread_time() - began < 0.05
        assert below.manager.has_pending_work()
        assert len(stored.keys_to_store) == 256
        below.settle(60)
        below.end(request)


def test_requests_that_were_aborted_leave_no_state(below):
    keys = chain(1, 10)
    below.save(keys)
    below.forget_primary()
    for _ in range(50):
        request = below.begin(keys)
        below.look_up_once(request, keys)
        below.end(request)
        below.step()
    below.settle()
    assert below.tier.stats()["requests"] == 0
    assert below.tier._loads == {}
    assert below.serves(keys) == 10
