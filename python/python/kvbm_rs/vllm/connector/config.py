"""What `kv_connector_extra_config` may say, and what the bytes of blocks depend on."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from kvbm_rs import Settings
from kvbm_rs.errors import InvalidError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Seconds: how long leader and ranks wait for each other when an engine starts.
_JOIN = 300.0

_VALID = {
    "settings": dict,
    "weights": str,
    "weights_never_change": bool,
    "save_generated": bool,
}


class Config:
    """What both roles know.

    In `kv_connector_extra_config`:

    - `settings`: tiers, by the names of docs/configuration.md, such as `{"host.capacity": "20GB"}`. They come over
      `DYN_KVBM_*` variables.
    - `weights`: names the weights, where the model's path or revision does not. Kept blocks of other weights are not
      found.
    - `weights_never_change` (`false`): what is kept outlives a reset of vLLM's caches, such as for sleep.
    - `save_generated` (`true`): whether blocks of generated tokens are saved, and not prompts alone.
    """

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        _check(extra)
        parallel = vllm_config.parallel_config
        if len(kv_cache_config.kv_cache_groups) != 1:
            groups = len(kv_cache_config.kv_cache_groups)
            raise InvalidError(f"KvbmConnector keeps models of one cache group, and this one has {groups}")
        if parallel.pipeline_parallel_size > 1:
            raise InvalidError("KvbmConnector has no pipeline parallelism: set pipeline_parallel_size to 1")
        group = kv_cache_config.kv_cache_groups[0]
        self.engine = transfer.engine_id
        self.world: int = parallel.tensor_parallel_size
        # With one worker in the scheduler's process, the manager copies itself.
        self.is_alone = self.world == 1 and parallel.distributed_executor_backend == "uni"
        self.max_tokens: int = vllm_config.model_config.max_model_len
        self.layers = tuple(group.layer_names)
        self.slots: int = kv_cache_config.num_blocks
        self.block_tokens: int = group.kv_cache_spec.block_size
        self.block_bytes: int = group.kv_cache_spec.page_size_bytes * len(self.layers)
        self.weights_never_change: bool = extra.get("weights_never_change", False)
        self.save_generated: bool = extra.get("save_generated", True)
        events = vllm_config.kv_events_config
        self.publishes = events is not None and events.enable_kv_cache_events
        self.settings = Settings.from_environment(
            {**extra.get("settings", {}), "block_bytes": self.block_bytes}
        )
        self.fingerprint = _fingerprint(vllm_config, self, extra.get("weights"))

    def ranks(self) -> tuple[Path, int, float]:
        """Where leader and ranks meet, how many ranks there are, and how long each waits for the others."""
        name = hashlib.blake2b(self.engine.encode(), digest_size=8).hexdigest()
        return Path(tempfile.gettempdir()) / f"kvbm-{os.getuid()}-{name}", self.world, _JOIN


def _check(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        kind = _VALID.get(name)
        if kind is None:
            valid = ", ".join(_VALID)
            raise InvalidError(f"kv_connector_extra_config: KvbmConnector has no {name!r}; valid: {valid}")
        if not isinstance(value, kind):
            raise InvalidError(f"kv_connector_extra_config: {name} is a {kind.__name__}, not {value!r}")


def _fingerprint(vllm_config: "VllmConfig", config: Config, weights: str | None) -> dict[str, Any]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    dtype = cache.cache_dtype if cache.cache_dtype != "auto" else str(model.dtype)
    shape = [len(config.layers), config.block_bytes // len(config.layers)]
    return {
        "model": str(model.model),
        "weights": weights or _weights(model),
        "dtype": dtype,
        "layouts": [(len(config.layers), "layer,byte", shape, [shape[1], 1])],
        "tensor_world": config.world,
        "block_tokens": config.block_tokens,
        "rope_scaling": repr(getattr(model.hf_text_config, "rope_parameters", None)),
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "hash_algorithm": algorithm,
        "hash_seed": _seed(algorithm),
    }


def _weights(model: Any) -> str:
    """Names weights: the files of a directory by name, size and time, anything else by its revision."""
    directory = Path(model.model)
    if not directory.is_dir():
        return str(model.revision or "main")
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(directory.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".pt", ".gguf") or file.name == "config.json":
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    # Weights that are made up are made of the seed.
    digest.update(f"{model.seed}".encode())
    return digest.hexdigest()


def _seed(algorithm: str) -> bytes:
    """What the first block of every chain is hashed with: vLLM's own rule."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed.encode()
    # Of xxhash vLLM draws a seed for each process: nobody finds its blocks again.
    return os.urandom(16) if algorithm.startswith("xxhash") else b"vllm-none-hash"
