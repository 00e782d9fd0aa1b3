"""Pools beside the KV cache (SGLang's interface v2): states, windows, indices of hybrid models."""

import pytest
import torch
from hicache import PAGE, HiCache, bytes_of, extra, host_pool, on_disk, pattern, tokens
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from kvbm_rs.sglang.storage import KvbmStorage
from sglang.srt.mem_cache.utils import get_hash_str


class Pools:
    """A storage with several host pools, as SGLang's hybrid controller registers them."""

    def __init__(self, place, names=(PoolName.MAMBA, PoolName.DRAFT), **others) -> None:
        fields = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "made-up",
        }  # fmt: skip
        settings = others.pop("settings", on_disk(place, **{"disk.capacity": "32MiB"}))
        config = extra(settings, **others.pop("config", {}))
        self.storage = KvbmStorage(HiCacheStorageConfig(**(fields | others), extra_config=config), {})
        # Pages of the others have another size.
        self.hosts = {PoolName.KV: host_pool(), **{name: host_pool(layers=3 + at) for at, name in enumerate(names)}}
        self.storage.register_mem_pool_host(self.hosts[PoolName.KV])
        for name, host in self.hosts.items():
            self.storage.register_mem_host_pool_v2(host, name)
        self.storage.on_host_pools_registered()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.storage.close()

    def transfer(self, name: PoolName, keys: list[str], policy=PoolHitPolicy.ALL_PAGES) -> PoolTransfer:
        indices = self.hosts[name].alloc(len(keys) * PAGE) if keys else torch.empty(0, dtype=torch.int64)
        return PoolTransfer(name, host_indices=indices, keys=keys, hit_policy=policy)

    def write(self, transfer: PoolTransfer) -> None:
        host = self.hosts[transfer.name]
        for key, index in zip(transfer.keys, transfer.host_indices[::PAGE].tolist()):
            page = host.get_data_page(index, flat=True)
            host.set_from_flat_data_page(index, pattern(f"{len(transfer.name)}{key[1:]}", page).view(page.dtype))

    def are_right(self, transfer: PoolTransfer) -> bool:
        host = self.hosts[transfer.name]
        pages = [host.get_data_page(index, flat=True) for index in transfer.host_indices[::PAGE].tolist()]
        return all(
            torch.equal(bytes_of(page), pattern(f"{len(transfer.name)}{key[1:]}", page))
            for key, page in zip(transfer.keys, pages)
        )

    def save(self, *named: tuple[PoolName, list[str]]) -> None:
        for name, keys in named:
            transfer = self.transfer(name, keys)
            self.write(transfer)
            if name == PoolName.KV:
                assert self.storage.batch_set_v1(keys, transfer.host_indices, HiCacheStorageExtraInfo([])) == [True] * len(keys)
            else:
                assert self.storage.batch_set_v2([transfer]) == {name: [True] * len(keys)}


def keys_of(number: int, pages: int) -> list[str]:
    return get_hash_str(tokens(number, pages), None, page_size=PAGE)


def test_pages_of_all_pools_come_back_also_after_a_restart(tmp_path):
    keys = keys_of(1, 12)
    with Pools(tmp_path) as pools:
        pools.save((PoolName.KV, keys), (PoolName.DRAFT, keys), (PoolName.MAMBA, [keys[5], keys[11]]))
    with Pools(tmp_path) as pools:
        wanted = [pools.transfer(PoolName.DRAFT, keys), pools.transfer(PoolName.MAMBA, keys[11:])]
        assert pools.storage.batch_get_v2(wanted) == {PoolName.DRAFT: [True] * 12, PoolName.MAMBA: [True]}
        assert all(map(pools.are_right, wanted))
        kv = pools.transfer(PoolName.KV, keys)
        assert pools.storage.batch_get_v1(keys, kv.host_indices) == [True] * 12
        assert pools.are_right(kv)
        # The KV cache by either interface.
        kv = pools.transfer(PoolName.KV, keys)
        assert pools.storage.batch_get_v2([kv]) == {PoolName.KV: [True] * 12}
        assert pools.are_right(kv)


@pytest.mark.parametrize(
    "stored, window, restorable",
    [([5, 11], 1, [6, 12]), ([4, 5, 6, 10, 11], 2, [6, 7, 12]), (range(12), 3, range(1, 13)), ([], 1, [])],
)
def test_ends_of_prompts(tmp_path, stored, window, restorable):
    """A prompt can be gone on from where the last pages of a window, or a state, are."""
    keys = keys_of(1, 12)
    with Pools(tmp_path) as pools:
        pools.save((PoolName.KV, keys), (PoolName.MAMBA, [keys[at] for at in stored]))
        asked = PoolTransfer(PoolName.MAMBA, keys=keys[-window:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = pools.storage.batch_exists_v2(keys, [asked])
        assert found.restorable_prefix_pages == list(restorable)
        assert found.kv_hit_pages == max(restorable, default=0)
        assert found.extra_pool_hit_pages == {PoolName.KV: 12} | ({PoolName.MAMBA: max(restorable)} if restorable else {})


def test_pools_that_need_every_page(tmp_path):
    keys = keys_of(1, 12)
    with Pools(tmp_path) as pools:
        pools.save((PoolName.KV, keys[:10]), (PoolName.DRAFT, keys[:7] + keys[8:]))
        draft = PoolTransfer(PoolName.DRAFT, keys=keys)
        found = pools.storage.batch_exists_v2(keys, [draft])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (7, {PoolName.KV: 10, PoolName.DRAFT: 7})
        groups = PoolTransfer(PoolName.DRAFT, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        found = pools.storage.batch_exists_v2(keys, [groups])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (10, {PoolName.KV: 10}), "it has no say"
        wanted = pools.transfer(PoolName.DRAFT, keys)
        assert pools.storage.batch_get_v2([wanted]) == {PoolName.DRAFT: [True] * 7 + [False] + [True] * 4}


def test_a_pool_that_nobody_registered_is_a_miss(tmp_path):
    keys = keys_of(1, 4)
    with Pools(tmp_path, names=()) as pools:
        pools.save((PoolName.KV, keys))
        unknown = PoolTransfer(PoolName.SWA, host_indices=torch.arange(4 * PAGE), keys=keys)
        assert pools.storage.batch_set_v2([unknown]) == {PoolName.SWA: [False] * 4}
        assert pools.storage.batch_get_v2([unknown]) == {PoolName.SWA: [False] * 4}
        assert pools.storage.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0
        assert pools.storage.batch_exists_v2(keys).kv_hit_pages == 4


def test_pools_share_the_tiers_by_their_size(tmp_path):
    with Pools(tmp_path) as pools:
        pages = {name: pools.storage._pages[str(name)].occupancy()["disk"][0] for name in pools.hosts}
    # As many pages each: there are as many in SGLang's memory.
    assert max(pages.values()) - min(pages.values()) <= 1
    sizes = {PoolName.KV: 2, PoolName.MAMBA: 3, PoolName.DRAFT: 4}
    page = 2 * PAGE * 4 * 32 * 2
    assert sum(pages[name] * layers * page for name, layers in sizes.items()) <= 32 << 20


def test_a_pool_with_settings_of_its_own(tmp_path):
    own = {"pools": {"mamba": {"disk.capacity": "7 blocks"}}}
    with Pools(tmp_path, config=own) as pools:
        assert pools.storage._pages["mamba"].occupancy()["disk"][0] == 7
        late = host_pool(layers=1)
        pools.storage.register_mem_host_pool_v2(late, PoolName.SWA)
        assert "swa" not in pools.storage.stats()
        pools.storage.clear()
        assert set(pools.storage.stats()) == {"kv", "mamba", "draft"}


def test_ranks_that_all_hold_the_same_kv(tmp_path):
    """Of MLA models rank 0 stores alone; the others find it in objects."""
    keys = keys_of(1, 6)
    objects = {"object.url": f"file://{tmp_path}/objects", "object.keep": True, "object.discover_ms": 100}
    mla = {"is_mla_model": True, "tp_size": 2, "names": (), "settings": on_disk(tmp_path) | objects}
    with Pools(tmp_path, **mla, tp_rank=0) as first, Pools(tmp_path, **mla, tp_rank=1) as second:
        first.save((PoolName.KV, keys))
        first.storage.close()
        second.storage.close()
    with Pools(tmp_path, **mla, tp_rank=1) as second:
        wanted = second.transfer(PoolName.KV, keys)
        assert second.storage.batch_get_v1(keys, wanted.host_indices) == [True] * 6
        assert second.are_right(wanted)
    with pytest.raises(ValueError, match=r"Set object\.url"):
        Pools(tmp_path, is_mla_model=True, tp_size=2, tp_rank=1, names=())
