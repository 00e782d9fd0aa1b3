"""`KvbmStorage` below SGLang's own controller and host pools: every byte is right, and a bad day costs time, not correctness."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from hicache import PAGE, HiCache, bytes_of, extra, on_disk, pattern, tokens
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

# Says to each call what comes before.
TELLS = {"hicache_storage_pass_prefix_keys": True}


def below(place: Path, **others) -> dict:
    return extra(on_disk(place), **TELLS) | others


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
@pytest.mark.parametrize("tells", [True, False])
def test_pages_come_back_in_every_layout(tmp_path, layout, tells):
    prompt = tokens(1, 20)
    config = extra(on_disk(tmp_path), hicache_storage_pass_prefix_keys=tells)
    with HiCache(config, layout) as cache:
        assert cache.serves(prompt) == 0
        assert cache.backup(prompt) == 20
        assert cache.serves(prompt) == 20
        # A prompt that begins alike, and one whose beginning SGLang has itself.
        assert cache.serves(prompt[: 7 * PAGE] + tokens(2, 5)) == 7
        assert cache.serves(prompt, first=12) == 8
        assert cache.serves(tokens(3, 4)) == 0
    # The next process finds them.
    with HiCache(config, layout) as cache:
        assert cache.serves(prompt) == 20


def test_batches_of_a_long_prompt_hang_on_each_other(tmp_path):
    """SGLang brings 128 pages at a time."""
    prompt = tokens(1, 300)
    with HiCache(below(tmp_path), pages=320) as cache:
        assert cache.backup(prompt) == 300
        assert cache.serves(prompt) == 300
        assert cache.storage.stats()["kv"]["stored_alone"] == 0


def test_a_node_hangs_on_those_before_it(tmp_path):
    prompt = tokens(1, 30)
    with HiCache(below(tmp_path)) as cache:
        assert cache.backup(prompt[: 12 * PAGE]) == 12
        assert cache.backup(prompt, first=12) == 18
        stats = cache.storage.stats()["kv"]
        assert (stats["stored"], stats["stored_alone"]) == (30, 0)
        assert cache.serves(prompt) == 30
        # What is there already is not copied again.
        assert cache.backup(prompt) == 30
        assert cache.storage.stats()["kv"]["stored"] == 30


def test_a_node_whose_beginning_is_not_here_is_kept_nevertheless(tmp_path):
    prompt = tokens(1, 30)
    with HiCache(below(tmp_path)) as cache:
        assert cache.backup(prompt, first=12) == 18
        assert cache.storage.stats()["kv"]["stored_alone"] == 18
        assert cache.serves(prompt) == 0
        # SGLang has the beginning.
        assert cache.serves(prompt, first=12) == 18
        # And then it comes here too.
        assert cache.backup(prompt[: 12 * PAGE]) == 12
        assert cache.serves(prompt) == 30


def test_holes_are_not_passed_over(tmp_path):
    """Without the chain a page in the middle may be missing: what is behind it must not take its place."""
    prompt = tokens(1, 12)
    with HiCache(extra(on_disk(tmp_path))) as cache:
        keys = cache.keys(prompt)
        assert cache.backup(prompt[: 5 * PAGE]) == 5
        assert cache.backup(prompt, first=7) == 5
        assert cache.storage.batch_exists(keys) == 5
        assert cache.serves(prompt) == 5
        assert cache.serves(prompt, first=7) == 5
        indices = cache.host.alloc(12 * PAGE)
        assert cache.storage.batch_get_v1(keys, indices) == [True] * 5 + [False] * 2 + [True] * 5
        for at, key in enumerate(keys):
            if at not in (5, 6):
                page = cache.host.get_data_page(int(indices[at * PAGE]), flat=True)
                assert torch.equal(bytes_of(page), pattern(key, page))


def corrupt(place: Path) -> None:
    """Changes a bit in the middle of every 4 KiB of the slot files."""
    files = [path for path in place.iterdir() if path.suffix == ".blocks"]
    assert files
    for path in files:
        with open(path, "r+b") as file:
            for at in range(100, path.stat().st_size, 4096):
                file.seek(at)
                byte = file.read(1)
                if byte:
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x10]))


def test_corruption_is_a_miss_and_then_it_heals(tmp_path):
    prompt = tokens(1, 10)
    # Nothing else looks at the blocks meanwhile.
    settings = on_disk(tmp_path) | {"transfer.scrub_mib_per_second": 0}
    with HiCache(extra(settings, **TELLS)) as cache:
        assert cache.backup(prompt) == 10
        corrupt(tmp_path)
        assert cache.serves(prompt) == 0
        assert cache.storage.stats()["kv"]["failed_loads"] == 10
        # It is computed again, stored again, and served.
        assert cache.backup(prompt) == 10
        assert cache.serves(prompt) == 10


def test_bytes_that_are_wrong_show(tmp_path):
    """The comparison itself: a page that is not what its name says is seen."""
    prompt = tokens(1, 4)
    with HiCache(below(tmp_path)) as cache:
        indices = cache.host.alloc(4 * PAGE)
        assert cache.storage.batch_set_v1(cache.keys(prompt), indices) == [True] * 4
        with pytest.raises(AssertionError, match="a wrong byte"):
            cache.serves(prompt)


def test_sglangs_failure_injector(tmp_path, monkeypatch):
    """Calls that fail at random lose hits, never bytes; and when they fail no more, everything is served again."""
    prompts = [tokens(number, 6 + number) for number in range(8)]
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
    served = 0
    with HiCache(below(tmp_path)) as cache:
        assert isinstance(cache.storage, HiCacheStorageFailureInjector)
        for _ in range(8):
            for prompt in prompts:
                cache.backup(prompt)
                served += cache.serves(prompt)
    assert 0 < served < 8 * sum(6 + number for number in range(8))
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE")
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY")
    with HiCache(below(tmp_path)) as cache:
        for number, prompt in enumerate(prompts):
            assert cache.backup(prompt) == 6 + number
            assert cache.serves(prompt) == 6 + number


def test_more_than_there_is_room_for(tmp_path):
    """Old prompts leave, and none is served in part from another."""
    prompts = [tokens(number, 12) for number in range(12)]
    with HiCache(extra(on_disk(tmp_path) | {"disk.capacity": "40 blocks", "eviction": "lru"}, **TELLS)) as cache:
        for prompt in prompts:
            cache.backup(prompt)
            assert 0 <= cache.serves(prompt) <= 12
        assert cache.serves(prompts[-1]) == 12
        assert sum(map(cache.serves, prompts)) <= 40


def test_clear_forgets_for_good(tmp_path):
    prompt = tokens(1, 10)
    with HiCache(below(tmp_path)) as cache:
        assert cache.backup(prompt) == 10
        cache.storage.clear()
        assert cache.serves(prompt) == 0
        assert cache.backup(prompt) == 10
        assert cache.serves(prompt) == 10
        cache.storage.clear()
    with HiCache(below(tmp_path)) as cache:
        assert cache.serves(prompt) == 0


def test_what_exchanged_weights_left_serves_no_later_process(tmp_path):
    """A clear stands for weights that were exchanged, and a restart has those of its files again."""
    prompt = tokens(1, 10)
    with HiCache(below(tmp_path)) as cache:
        cache.storage.clear()
        assert cache.backup(prompt) == 10
        assert cache.serves(prompt) == 10
    with HiCache(below(tmp_path)) as cache:
        assert cache.serves(prompt) == 0
        assert cache.backup(prompt) == 10
    # And then it heals.
    with HiCache(below(tmp_path)) as cache:
        assert cache.serves(prompt) == 10


def test_ranks_of_attention_in_data_parallel_share_one_configuration(tmp_path):
    """SGLang gives them the same tensor ranks."""
    prompts = [tokens(rank, 10) for rank in (0, 1)]
    for _ in range(2):
        with HiCache(below(tmp_path), data_rank=0) as first, HiCache(below(tmp_path), data_rank=1) as second:
            for cache, own, other in ((first, *prompts), (second, *reversed(prompts))):
                cache.backup(own)
                assert (cache.serves(own), cache.serves(other)) == (10, 0)


def test_a_start_says_what_there_is(tmp_path, caplog):
    caplog.set_level("INFO", "sglang.kvbm")
    with HiCache(below(tmp_path)) as cache:
        assert cache.backup(tokens(1, 10)) == 10
    caplog.clear()
    with HiCache(below(tmp_path)):
        pass
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("KvbmStorage, pool kv, of kvbm_rs") for line in said), said
    assert any(line.startswith("disk: ") and line.endswith("10 blocks of an earlier process") for line in said), said


def test_clear_amid_copies(tmp_path):
    """Nothing raises, no byte is wrong, and afterwards all is well."""
    with HiCache(below(tmp_path)) as cache:
        is_over = threading.Event()

        def clear() -> None:
            while not is_over.wait(0.003):
                cache.storage.clear()

        clearing = threading.Thread(target=clear)
        clearing.start()
        for number in range(60):
            prompt = tokens(number % 6, 20)
            assert 0 <= cache.backup(prompt) <= 20
            assert 0 <= cache.serves(prompt) <= 20
        is_over.set()
        clearing.join()
        assert cache.backup(tokens(1, 20)) == 20
        assert cache.serves(tokens(1, 20)) == 20


def test_other_weights_layouts_and_ranks_find_nothing(tmp_path):
    prompt = tokens(1, 10)
    with HiCache(below(tmp_path)) as cache:
        assert cache.backup(prompt) == 10
    for config, others in [
        (below(tmp_path, weights="others"), {}),
        (below(tmp_path), {"layout": "layer_first"}),
        (below(tmp_path), {"ranks": (0, 2)}),
        (below(tmp_path), {"ranks": (1, 2)}),
    ]:
        with HiCache(config, **others) as cache:
            assert cache.serves(prompt) == 0, others
            # In the same directory, beside the first.
            assert cache.backup(prompt) == 10
            assert cache.serves(prompt) == 10
    with HiCache(below(tmp_path)) as cache:
        assert cache.serves(prompt) == 10


def test_objects_and_memory(tmp_path):
    prompt = tokens(1, 12)
    objects = extra({"object.url": f"file://{tmp_path}/objects", "object.keep": True}, **TELLS)
    with HiCache(objects) as cache:
        assert cache.backup(prompt) == 12
    with HiCache(objects) as cache:
        assert cache.serves(prompt) == 12
    with HiCache(extra({"host.capacity": "64 blocks"}, **TELLS)) as cache:
        assert cache.backup(prompt) == 12
        assert cache.serves(prompt) == 12


def test_bad_calls_are_misses(tmp_path):
    prompt = tokens(1, 4)
    with HiCache(below(tmp_path)) as cache:
        keys, storage = cache.keys(prompt), cache.storage
        few = cache.host.alloc(3 * PAGE)
        assert storage.batch_set_v1(keys, few) == [False] * 4
        assert storage.batch_get_v1(keys, few) == [False] * 4
        assert storage.batch_exists(["no hexadecimal"]) == 0
        assert storage.batch_set_v1(["short"], few[:PAGE]) == [False]
        beyond = torch.arange(PAGE) + 1_000 * PAGE
        assert storage.batch_set_v1(keys[:1], beyond) == [False]
        assert storage.batch_get_v1([], few[:0]) == []
        assert cache.backup(prompt) == 4
        assert storage.batch_get_v1(keys[:1], beyond) == [False]
        # Two pages cannot come to one place.
        assert storage.batch_get_v1(keys[:2], few[:PAGE].repeat(2)) == [False] * 2
        assert storage.exists(keys[0]) and not storage.exists(cache.keys(tokens(2, 1))[0])
        assert cache.serves(prompt) == 4


def test_settings_are_checked_at_start(tmp_path):
    for wrong, words in [
        (extra({"disk.capcity": "1GB"}), "disk.capacity"),
        (extra({"disk.capacity": "many"}), "many"),
        (extra({"block_bytes": 4096}), "leave it out"),
        (below(tmp_path, setings={}), "'setings'; valid: settings"),
        (below(tmp_path, settings=[]), "settings cannot be"),
        (below(tmp_path, shutdown_seconds=True), "shutdown_seconds cannot be true"),
        (below(tmp_path, pools={"mamba": {"disk.capcity": "1GB"}}), "disk.capacity"),
        (below(tmp_path, pools={"mamba": 7}), "pools.mamba has settings"),
        (below(tmp_path, interface_v1=0), "interface_v1"),
        (below(tmp_path, weights=""), "which weights made-up has"),
        (extra({}), "host.capacity"),
    ]:
        with pytest.raises(ValueError, match=words):
            HiCache(wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_shutdown_leaves_nothing_behind(tmp_path):
    threads = set(os.listdir("/proc/self/task"))
    for number in range(3):
        with HiCache(below(tmp_path)) as cache:
            assert cache.backup(tokens(number, 20)) == 20
            storage = cache.storage
        assert storage.batch_exists(storage_keys(number)) == 0
        assert storage.stats() == {}
        del cache
        gc.collect()
    deadline = time.monotonic() + 20
    while set(os.listdir("/proc/self/task")) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(os.listdir("/proc/self/task")) <= threads


def storage_keys(number: int) -> list[str]:
    from sglang.srt.mem_cache.utils import get_hash_str

    return get_hash_str(tokens(number, 20), None, page_size=PAGE)


def test_sglang_is_told_how_much_and_how_fast(tmp_path):
    prompt = tokens(1, 10)
    with HiCache(below(tmp_path), metrics=True) as cache:
        cache.backup(prompt)
        cache.serves(prompt)
        told = cache.storage.get_stats()
        assert (told.backup_pgs, told.prefetch_pgs) == ([10], [10])
        assert told.backup_bandwidth[0] > 0 and told.prefetch_bandwidth[0] > 0
        assert cache.storage.get_stats().backup_pgs == []
