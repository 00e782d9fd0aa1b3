"""Who serves: arguments of an engine by name, all with the same DRAM below the same engine."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from connector_figures import connector
from engine import offloading


class Absent(Exception):
    """It cannot be run here, and why."""


@dataclass(frozen=True)
class Room:
    # Bytes of DRAM below the engine, of files, and a directory for them.
    dram: int
    files: int
    place: Path
    is_gpu: bool


def nothing(room: Room) -> dict:
    return {"enable_prefix_caching": False}


def prefix_cache(room: Room) -> dict:
    return {}


def vllm_cpu(room: Room) -> dict:
    return _offloading(room)


def vllm_fs(room: Room) -> dict:
    return _offloading(room, {"type": "fs", "root_dir": str(room.place)})


def kvbm_tier(room: Room) -> dict:
    disk = {"disk.capacity": room.files, "disk.dirs": str(room.place)}
    return _offloading(room, {"type": "KvbmTier", "module_path": "kvbm_rs.vllm.tier", "weights": "made up", **disk})


def connector_memory(room: Room) -> dict:
    return connector({"host.capacity": room.dram})


def connector_disk(room: Room) -> dict:
    return connector({"host.capacity": room.dram, "disk.capacity": room.files, "disk.dirs": str(room.place)})


def connector_objects(room: Room) -> dict:
    return connector({"host.capacity": room.dram, "object.url": f"file://{room.place}"})


def lmcache(room: Room) -> dict:
    if importlib.util.find_spec("lmcache") is None:
        raise Absent("lmcache is not installed")
    if not room.is_gpu:
        # It starts all the same (0.5.6): then each look-up waits three seconds for what did not start.
        raise Absent("LMCache has no connector for CPUs")
    extra = {"lmcache.chunk_size": 32, "lmcache.local_cpu": True, "lmcache.max_local_cpu_size": room.dram / 1e9}
    return {
        "kv_transfer_config": {
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


CONTENDERS = {
    "nothing": nothing,
    "vLLM's prefix cache": prefix_cache,
    "vLLM's CPU tier": vllm_cpu,
    "vLLM's CPU and fs tiers": vllm_fs,
    "KvbmTier, disk": kvbm_tier,
    "KvbmConnector, memory": connector_memory,
    "KvbmConnector, memory and disk": connector_disk,
    "KvbmConnector, memory and file://": connector_objects,
    "LMCache, memory": lmcache,
}


def _offloading(room: Room, *tiers: dict) -> dict:
    """vLLM's own needs a worker of the tests' on a CPU, which copies in the engine's thread."""
    extra = offloading(room.dram, *tiers)
    if room.is_gpu:
        extra |= {"spec_name": "TieringOffloadingSpec"}
        del extra["spec_module_path"]
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }
