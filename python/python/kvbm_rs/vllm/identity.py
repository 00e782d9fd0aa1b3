"""What the bytes of a chunk depend on besides its tokens: chunks of another model are never taken for this one's."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm_rs.errors import InvalidError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def of_offloading(config: "OffloadingConfig", weights: str | None) -> dict[str, Any]:
    """The identity of what vLLM offloads; `weights` names the model's weights where the caller knows better."""
    import vllm

    parallel = config.parallel
    layers = [list(group.layer_names) for group in config.groups]
    context = f"pcp={parallel.pcp_size} dcp={parallel.dcp_size}"
    tokens = [group.tokens_per_block for group in config.groups]
    layout = (
        f"{config.kv_cache_layout} blocks={tokens}x{config.cache.blocks_per_chunk} {context} world={parallel.world_size}"
        f" replicated={config.replicated_layout} canonical={config.canonical_layout} layers={layers}"
    )
    return {
        "model": config.model.name,
        "weights": weights or weights_of(config.model.name),
        "dtype": config.model.dtype,
        "layout": layout,
        "layers": sum(map(len, layers)),
        "tensor_world": parallel.tp_size,
        "pipeline_world": parallel.pp_size,
        "engine_version": vllm.__version__,
        # Its algorithm is not told; keys of another one are others.
        "hashing": f"vllm per {config.cache.tokens_per_hash}",
        "seed": os.environ.get("PYTHONHASHSEED", "").encode(),
    }


def weights_of(model: str) -> str:
    """What tells the weights of `model` from others: of a directory the names, sizes and times of its files, of a model of the
    hub its commit. vLLM does not say which commit it serves, so only one may be in the cache.
    """
    if Path(model).is_dir():
        return f"files {digest_of_files(Path(model))}"
    commits = commits_of(model)
    if len(commits) == 1:
        return f"commit {commits[0]}"
    found = f"{len(commits)} commits of it" if commits else "nothing of it"
    message = f"cannot tell which weights {model} has: {found} in the cache of the hub. Name them: `weights` of the tier"
    raise InvalidError(message)


def digest_of_files(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        stat = path.stat()
        digest.update(f"{path.relative_to(directory)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def commits_of(model: str) -> list[str]:
    """The commits of a model of the hub that are in its cache: `models--OWNER--NAME/snapshots/COMMIT`."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return []
    snapshots = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "snapshots")
    return [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []
