"""A KV block manager for LLM inference: device, host, disk and object tiers.

Settings are those of docs/configuration.md: `Settings.from_environment()`, `Settings.from_dict({...})`,
`Settings.from_toml(text)`. An engine that copies for itself keeps its blocks in `Blocks`.
"""

from kvbm_rs import errors, logs
from kvbm_rs._native import (
    Blocks,
    CacheGroup,
    Chain,
    EngineMemory,
    Events,
    Hints,
    KvMoved,
    KvTransfer,
    LayeredSave,
    Lease,
    Load,
    LoadEnd,
    Manager,
    PeerLease,
    PeerLeasing,
    Pull,
    PullEnd,
    Rank,
    Save,
    SaveEnd,
    Settings,
    SliceLoad,
    nixl_is_available,
    request_number,
    version,
)

__version__ = version()

__all__ = [
    "Blocks",
    "CacheGroup",
    "Chain",
    "EngineMemory",
    "Events",
    "Hints",
    "KvMoved",
    "KvTransfer",
    "LayeredSave",
    "Lease",
    "Load",
    "LoadEnd",
    "Manager",
    "PeerLease",
    "PeerLeasing",
    "Pull",
    "PullEnd",
    "Rank",
    "Save",
    "SaveEnd",
    "Settings",
    "SliceLoad",
    "errors",
    "logs",
    "nixl_is_available",
    "request_number",
    "version",
]
