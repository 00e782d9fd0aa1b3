"""What the bytes of a chunk depend on besides its tokens: chunks of another model are never taken for this one's."""

import os
from typing import TYPE_CHECKING, Any

from kvbm_rs.weights import model_name, weights_of

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
        "model": model_name(config.model.name, weights),
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
