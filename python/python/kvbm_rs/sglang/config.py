"""What `--hicache-storage-backend-extra-config` may say, and what the bytes of pages depend on."""

import json
import os
from typing import TYPE_CHECKING, Any

import sglang

from kvbm_rs import Settings
from kvbm_rs.errors import InvalidError
from kvbm_rs.sglang import logger
from kvbm_rs.weights import weights_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvbm_rs.sglang.pages import Layout

_RUN_WITH = "0.5.23"

# SGLang's own: which class it is to load.
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")

_VALID = {
    "settings": dict,
    "pools": dict,
    "weights": str,
    "shutdown_seconds": (int, float),
}


class Config:
    """What the extra configuration says.

    - `settings`: tiers, by the names of docs/configuration.md, such as `{"disk.capacity": "500GB"}`. They come over
      `DYN_KVBM_*` variables.
    - `pools`: settings of other pools than the KV cache, by name, such as `{"mamba": {"disk.capacity": "50GB"}}`. By default
      each gets as much of every tier as it has of SGLang's host memory.
    - `weights`: what tells the model's weights from others of the same name; by default found out.
    - `shutdown_seconds` (10): how long a shutdown may take to bring what is only in memory to its medium.
    """

    def __init__(self, storage: "HiCacheStorageConfig") -> None:
        extra = storage.extra_config or {}
        _check(extra)
        if sglang.__version__ != _RUN_WITH:
            logger.warning("KvbmStorage has run with SGLang %s, not with %s", _RUN_WITH, sglang.__version__)
        self.storage = storage
        self.shutdown_seconds = float(extra.get("shutdown_seconds", 10.0))
        self._settings: dict[str, Any] = extra.get("settings", {})
        self._pools: dict[str, dict[str, Any]] = extra.get("pools", {})
        self._weights = extra.get("weights") or weights_of(_model_path(storage))
        for name in (None, *self._pools):
            # A typo is an error here already; how large a page is SGLang says later.
            read = self._read(name, {"block_bytes": 1})
            if self._only_reads(name or "kv") and read["object.url"] == "none":
                raise _no_objects(storage.tp_rank)

    def has_own(self, pool: str) -> bool:
        """Whether settings of this pool are given."""
        return pool in self._pools

    def settings(self, pool: str, page_bytes: int, share: float) -> Settings:
        """Of a pool that gets `share` of what the settings say, or what its own say."""
        fixed: dict[str, Any] = {"block_bytes": page_bytes}
        if self._only_reads(pool):
            # On disk and in memory it would only keep what others wrote to the objects.
            fixed |= {"disk.capacity": "0", "host.persist": None}
        if not self._serves_metrics(pool):
            fixed["metrics.enabled"] = False
        # With attention in data parallel its ranks have the same tensor ranks; of servers beside each other SGLang tells nothing.
        settings = self._read(pool if self.has_own(pool) else None, fixed).of_replica(self.storage.dp_rank)
        for remark in settings.remarks():
            logger.warning("%s", remark)
        return settings if self.has_own(pool) else settings.scaled(share)

    def fingerprint(self, pool: str, layout: "Layout") -> dict[str, Any]:
        """What the bytes of a pool's pages depend on besides tokens."""
        storage = self.storage
        order = f"{pool} {layout.order} cp={storage.attn_cp_rank}/{storage.attn_cp_size}"
        return {
            "model": storage.model_name or "",
            "weights": self._weights,
            "dtype": layout.dtype,
            "layouts": [(1, order, list(layout.pieces), [1] * len(layout.pieces))],
            "tensor_world": storage.tp_size,
            # All ranks of some models hold the same.
            "tensor_rank": 0 if self._is_replicated(pool) else storage.tp_rank,
            "pipeline_world": storage.pp_size,
            "pipeline_rank": storage.pp_rank,
            "block_tokens": layout.page_tokens,
            "engine": "sglang",
            "engine_version": sglang.__version__,
            "hash_algorithm": "sglang sha256",
        }

    def _read(self, pool: str | None, fixed: dict[str, Any]) -> Settings:
        values = dict(self._settings)
        if pool is not None:
            values |= self._pools[pool]
        if "block_bytes" in values:
            raise InvalidError("block_bytes: leave it out, a block is a page of SGLang's")
        return Settings.from_environment(values | fixed)

    def _is_replicated(self, pool: str) -> bool:
        """Whether all tensor ranks have the same pages. States are each rank's own also where the KV cache is everybody's."""
        return self.storage.is_mla_model and pool != "mamba"

    def _only_reads(self, pool: str) -> bool:
        """Of what all ranks have, SGLang stores one rank's."""
        return self._is_replicated(pool) and not self.storage.is_storage_writer

    def _serves_metrics(self, pool: str) -> bool:
        """One port serves one process's KV cache."""
        storage = self.storage
        return pool == "kv" and not (storage.tp_rank or storage.pp_rank or storage.attn_cp_rank or storage.dp_rank)


def _check(extra: dict[str, Any]) -> None:
    where = "hicache-storage-backend-extra-config"
    for name, value in extra.items():
        if name in _OF_SGLANG:
            continue
        kind = _VALID.get(name)
        if kind is None:
            valid = ", ".join((*_VALID, *_OF_SGLANG))
            raise InvalidError(f"{where}: KvbmStorage has no {name!r}; valid: {valid}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidError(f"{where}: {name} cannot be {json.dumps(value, default=str)}")
    for name, value in extra.get("pools", {}).items():
        if not isinstance(value, dict):
            raise InvalidError(f"{where}: pools.{name} has settings, not {value!r}")
    if not extra.get("interface_v1"):
        raise InvalidError(f'{where}: set "interface_v1": 1, else SGLang copies every page on the way')


def _model_path(storage: "HiCacheStorageConfig") -> str:
    """Where the model is: the name that pages go by may be one that clients call it by."""
    from sglang.srt.runtime_context import get_context, get_model

    if get_context().is_config_namespace_published("model"):
        return str(get_model().model_path)
    return storage.model_name or ""


def _no_objects(rank: int) -> InvalidError:
    return InvalidError(
        f"tensor rank {rank} of a model whose ranks all hold the same KV: SGLang stores that of rank 0 alone, and the others "
        "find it in objects. Set object.url"
    )
