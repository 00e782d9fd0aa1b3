"""`KvbmStorage`: below SGLang's HiCache, whose host pools it adopts as they lie, so that no page is copied on the way.

SGLang calls it on threads of its own: one asks what is here, one loads, one stores. All of them wait for media, and none is the
scheduler's. Whatever fails is a miss; only a start raises.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvbm_rs import logs
from kvbm_rs._native import flush_log
from kvbm_rs.errors import KvbmError
from kvbm_rs.sglang import logger
from kvbm_rs.sglang.config import Config
from kvbm_rs.sglang.pages import HostPool, Pages

KV = PoolName.KV.value

# Whatever of it comes is a miss: wrong calls, a closed manager, a reset meanwhile.
_FAILURES = (KvbmError, ValueError)


class KvbmStorage(HiCacheStorage):
    """Disk, objects and more memory below SGLang's host memory. docs/sglang.md shows how to configure it.

    Pages are named by SGLang's hashes of all tokens up to their end. What their bytes depend on besides (model, weights,
    layout, ranks) names the files and objects in which they lie.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = Config(storage_config)
        self._hosts: dict[str, HostPool] = {}
        self._pages: dict[str, Pages] = {}
        self._metrics = StorageMetrics()
        self._was_told_prefixes = True

    # A start.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        self._hosts[name] = HostPool(host_pool)
        if self._pages and name not in self._pages:
            self._register_late(name)

    def on_host_pools_registered(self) -> None:
        """Opens the tiers, which the pools share by their size in SGLang's memory."""
        sharing = sum(host.bytes for name, host in self._hosts.items() if not self._config.has_own(name))
        try:
            for name, host in self._hosts.items():
                self._open(name, host.bytes / max(sharing, 1))
        except Exception:
            self.close()
            raise

    def _register_late(self, name: str) -> None:
        if self._config.has_own(name):
            self._open(name, 1.0)
        else:
            logger.warning("the pool %s came after the tiers were shared: to keep it, give it settings in `pools`", name)

    def _open(self, name: str, share: float) -> None:
        host = self._hosts[name]
        settings = self._config.settings(name, host.layout.page_bytes, share)
        fingerprint = self._config.fingerprint(name, host.layout)
        # Of other pools SGLang may keep the end of a prompt alone.
        self._pages[name] = Pages(host, settings, fingerprint, is_chained=name == KV)
        logs.announce(f"KvbmStorage, pool {name},", self._pages[name])

    # The KV cache.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading ones are here. What comes before them does not matter: their names say it."""
        pages = self._pages.get(KV)
        if pages is None:
            return 0
        try:
            return pages.leading(keys)
        except _FAILURES:
            logger.exception("pages cannot be looked up")
            return 0

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        prefix = extra_info.prefix_keys if extra_info else None
        if prefix is None and self._was_told_prefixes:
            self._was_told_prefixes = False
            logger.warning('SGLang does not say what pages hang on: set "hicache_storage_pass_prefix_keys": true')
        return self._set(KV, prefix, keys, host_indices)

    # Other pools: states, windows, indices.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        leading = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers or []:
            # Groups of blocks never decide, and a pool that is not reported has no say.
            if restorable and transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS:
                lengths = self._lengths(transfer, keys[:leading])
                if lengths:
                    hits[transfer.name] = max(lengths)
                restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _lengths(self, transfer: PoolTransfer, keys: Sequence[str]) -> set[int]:
        """Lengths of a prompt, in pages, for which a pool has what it needs."""
        pages = self._pages.get(str(transfer.name))
        if pages is None:
            return set()
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
        else:
            window = len(keys)
        lengths, successive = set(), 0
        for length, is_here in enumerate(pages.here(keys), 1):
            successive = successive + 1 if is_here else 0
            if successive >= min(window, length):
                lengths.add(length)
        return lengths

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._get(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        prefix = extra_info.prefix_keys if extra_info else None
        return {one.name: self._set(str(one.name), prefix, one.keys or [], one.host_indices) for one in transfers}

    # Both.

    def _get(self, pool: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        pages, nothing = self._pages.get(pool), [False] * len(keys)
        if pages is None or indices is None:
            return nothing
        began = time.monotonic()
        try:
            loaded = pages.load(keys, indices)
        except _FAILURES:
            logger.exception("pages of the pool %s cannot be loaded", pool)
            return nothing
        self._measure(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, pool, sum(loaded), began)
        return loaded

    def _set(
        self, pool: str, prefix: Sequence[str] | None, keys: list[str], indices: torch.Tensor | None
    ) -> list[bool]:
        pages, nothing = self._pages.get(pool), [False] * len(keys)
        if pages is None or indices is None:
            return nothing
        began = time.monotonic()
        try:
            kept = pages.save(prefix, keys, indices)
        except _FAILURES:
            logger.exception("pages of the pool %s cannot be stored", pool)
            return nothing
        self._measure(self._metrics.backup_pgs, self._metrics.backup_bandwidth, pool, sum(kept), began)
        return kept

    def _measure(self, counts: list[int], paces: list[float], pool: str, pages: int, began: float) -> None:
        if self._config.storage.enable_storage_metrics and pages:
            counts.append(pages)
            took = max(time.monotonic() - began, 1e-9)
            paces.append(pages * self._hosts[pool].layout.page_bytes / took / 1e9)

    def get_stats(self) -> StorageMetrics:
        """What SGLang's own histograms show: pages of each call since the last time, and GB/s."""
        taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts of pages since the start, by pool; and how many each tier has now."""
        told = {}
        for name, pages in self._pages.items():
            here = {f"{tier}_pages": resident for tier, (_, resident) in pages.occupancy().items()}
            told[name] = pages.counts | here
        return told

    def clear(self) -> None:
        """Nothing that was stored is found again: other weights are served from here on."""
        for pages in self._pages.values():
            pages.forget()

    def close(self) -> None:
        """Lets go of SGLang's memory."""
        while self._pages:
            _, pages = self._pages.popitem()
            pages.close(self._config.shutdown_seconds)
        # SGLang ends its processes without asking Python to.
        flush_log()

    # The copying interface, which SGLang does not use with `interface_v1`.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False
