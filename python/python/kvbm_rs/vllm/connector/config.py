"""What `kv_connector_extra_config` may say, and what the bytes of blocks depend on."""

import hashlib
import math
import os
import platform
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvbm_rs import CacheGroup, EngineMemory, Settings
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm import versions
from kvbm_rs.weights import model_name, weights_at

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

# Seconds: how long leader and ranks wait for each other when an engine starts.
_JOIN = 300.0

_PEER_TIMEOUT_MS = 5000

_PRODUCER = "kv_producer"

_VALID = {
    "settings": dict,
    "weights": str,
    "weights_never_change": bool,
    "save_generated": bool,
    "layerwise": bool,
    "peer_timeout_ms": int,
}


@dataclass(frozen=True)
class Group:
    """Layers whose blocks the engine keeps alike."""

    # Its place among vLLM's groups.
    index: int
    layers: tuple[str, ...]
    # Bytes of a block in each layer.
    layer_bytes: tuple[int, ...]
    # Full blocks that a token looks back into; 0: every block is kept.
    window: int
    # Layers that keep a state in place of keys and values: as of the end of a block, so of one block.
    is_state: bool = False
    # Attention heads of one worker, and tokens of a block.
    heads: int = 0
    tokens: int = 0
    # Numbers of a head in the keys of a token.
    head_size: int = 0

    @property
    def block_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def shares(self) -> int:
        """Equal shares of a block's bytes, in the order of layers: one for each layer, unless they differ."""
        return len(self.layers) if len(set(self.layer_bytes)) == 1 else 1


class Config:
    """What both roles know.

    In `kv_connector_extra_config`:

    - `settings`: tiers, by the names of docs/configuration.md, such as `{"host.capacity": "20GB"}`. They come over
      `DYN_KVBM_*` variables.
    - `weights`: names the weights, where the model's path or revision does not. Kept blocks of other weights are not
      found.
    - `weights_never_change` (`false`): what is kept outlives a reset of vLLM's caches, such as for sleep.
    - `save_generated` (`true`): whether blocks of generated tokens are saved, and not prompts alone.
    - `layerwise` (`false`): whether what lies in memory is loaded while the engine computes, a layer ahead of it.
    - `peer_timeout_ms` (`5000`): how long a request waits for what a peer has computed of its prompt. Then
      `kv_load_failure_policy` says whether it computes that or fails.
    """

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        transfer = vllm_config.kv_transfer_config
        # Every role saves and loads. Of a producer vLLM does not keep blocks back that a step under way still writes.
        self.is_producer = transfer.kv_role == _PRODUCER
        # A worker also sees what a `MultiConnector` around it is, by which vLLM's scheduler goes.
        around = get_current_vllm_config_or_none()
        if around is not None and around.kv_transfer_config is not None:
            self._check_role(around.kv_transfer_config.kv_role)
            if around.kv_transfer_config.kv_load_failure_policy != transfer.kv_load_failure_policy:
                raise InvalidError(
                    "kv_load_failure_policy: KvbmConnector has another one than the MultiConnector around it, by which vLLM goes: "
                    "set it alike in both"
                )
        # Whether a request ends with an error if what another engine computed for it is lost; else it computes that.
        self.fails = transfer.kv_load_failure_policy == "fail"
        extra = self._extra(transfer)
        _check(extra)
        parallel = vllm_config.parallel_config
        _check_parallel(parallel)
        # The one that keeps every block comes first, and has number 0.
        self.groups = _groups(kv_cache_config)
        self.is_hybrid = len(self.groups) > 1
        # What a load must bring as a whole: behind blocks that left a window nothing can be computed but from the start.
        self.is_windowed = self.is_hybrid or not _keeps_all(kv_cache_config.kv_cache_groups[0])
        if self.is_windowed:
            versions.check_shows_tables("a model with sliding windows or states")
        if any(group.is_state for group in self.groups):
            _check_states(vllm_config)
        self.engine = transfer.engine_id
        # Stages of a pipeline, each with its layers, and workers of each.
        self.stages: int = parallel.pipeline_parallel_size
        self.workers: int = parallel.tensor_parallel_size
        _check_stages(self, vllm_config.model_config)
        # Into how many slices a stage's part of a block is cut, one for each worker; 1: all of them have the whole of it, and the
        # first keeps it.
        self.slices: int = 1 if _is_whole(kv_cache_config) else self.workers
        # With one worker in the scheduler's process, the manager copies itself.
        self.is_alone = self.stages * self.workers == 1 and parallel.distributed_executor_backend == "uni"
        self.max_tokens: int = vllm_config.model_config.max_model_len
        # Tokens that a request which decodes gains in a step, at most.
        self.step_tokens: int = 1 + getattr(vllm_config.speculative_config, "num_speculative_tokens", 0)
        self.slots: int = kv_cache_config.num_blocks
        self.block_tokens: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.hash_tokens = _hash_tokens(kv_cache_config, self.block_tokens)
        if self.hash_tokens != self.block_tokens and any(group.is_state for group in self.groups):
            raise InvalidError(
                "KvbmConnector keeps states at the ends of blocks, and with --prefix-match-unit vLLM keeps some of them elsewhere: "
                "leave it out, or use KvbmTier"
            )
        self.weights_never_change: bool = extra.get("weights_never_change", False)
        self.save_generated: bool = extra.get("save_generated", True)
        self.layerwise: bool = extra.get("layerwise", False)
        self.peer_seconds: float = extra.get("peer_timeout_ms", _PEER_TIMEOUT_MS) / 1000
        if self.layerwise:
            _check_layerwise(self, vllm_config)
        # Whether a prompt may be loaded to its end: vLLM then computes its last token again, and only that. A step that is to
        # compute while it loads has to have something to compute.
        self._loads_ends = not self.layerwise and all(map(_serves_its_last_token, kv_cache_config.kv_cache_groups))
        events = vllm_config.kv_events_config
        self.publishes = events is not None and events.enable_kv_cache_events
        settings = _settings(extra.get("settings", {}), self.groups[0].block_bytes)
        has_ports = settings["peers.enabled"] == "true" and settings["peers.port"] != "0"
        if has_ports and parallel.data_parallel_size > 1 and not self.is_alone:
            raise InvalidError(
                "peers.port: replicas of data parallelism take the ports behind it, and so do workers of one replica: set it to 0, "
                "or data_parallel_size to 1"
            )
        self.settings = settings.of_replica(parallel.data_parallel_index)
        # Whether prompts that a peer reads while they are computed are saved layer by layer.
        has_peers = settings["peers.enabled"] == "true"
        self.saves_layers = has_peers and self.is_alone and not _why_not_by_layers(self, vllm_config)
        # What the numbers of a block are, where hits are computed again and compared.
        self.shadow_elements = ""
        if float(settings["transfer.shadow_share"]) > 0:
            self.shadow_elements = _shadow_elements(self, vllm_config, kv_cache_config)
        lora = vllm_config.lora_config
        # How adapters are used: of what type their weights are made, and for which layers.
        self.adapter_options = lora and lora.compute_hash()
        self.names_media = _names_media(vllm_config)
        # Whether an engine with other blocks has the numbers of a token in the same order: what vLLM chooses itself may depend on
        # the size of blocks.
        attention = getattr(vllm_config, "attention_config", None)
        self.knows_rows = current_platform.is_cpu() or getattr(attention, "backend", None) is not None
        self._hash = vllm_config.cache_config.prefix_caching_hash_algo
        dtype = _dtype(vllm_config, kv_cache_config)
        self.fingerprint = _fingerprint(vllm_config, self, dtype, extra.get("weights"))
        # What an FP8 cache says of its numbers besides, once the layers are there; and where vLLM puts these.
        self._fp8 = _fp8(vllm_config, kv_cache_config) if self.knows_rows else None
        self._made = vllm_config.compilation_config.static_forward_context if self._fp8 else {}

    @staticmethod
    def _extra(transfer: Any) -> dict[str, Any]:
        return transfer.kv_connector_extra_config

    def _check_role(self, around: str) -> None:
        if around == _PRODUCER and not self.is_producer:
            raise InvalidError(
                "kv_role: with kv_producer in the MultiConnector around it vLLM gives KvbmConnector blocks to load into that a step "
                "under way still writes. Set kv_producer for KvbmConnector too, which then waits for that step"
            )

    def loadable(self, tokens: int) -> int:
        """Leading blocks of a prompt of `tokens` that may be loaded. Its last token is computed in any case: it gives the
        next one."""
        return (tokens if self._loads_ends else tokens - 1) // self.block_tokens

    def names_of(self, request: "Request", tokens: int) -> list[bytes]:
        """How vLLM names what a request has, at each multiple of `tokens`."""
        return versions.block_hashes(request, tokens, self._hash)

    def scaled_fingerprint(self) -> dict[str, Any]:
        """With the scales of an FP8 cache, by which a peer of another type takes its blocks. Only a worker can say it, which has
        the model."""
        order = self.fingerprint["layouts"][0][1]
        scales = self._fp8 and _scales([self._made.get(name) for name in self.groups[0].layers], order)
        return self.fingerprint | ({"dtype": self._fp8, "scales": scales} if scales else {})

    def others(self, memories: list[EngineMemory]) -> list[CacheGroup]:
        """The groups beside the first, with the memory of each."""
        return [
            CacheGroup(f"state_{number}", memory)
            if group.is_state
            else CacheGroup(f"window_{number}", memory, window=group.window)
            for number, (group, memory) in enumerate(zip(self.groups[1:], memories), 1)
        ]

    @property
    def is_shared(self) -> bool:
        """Whether what a stage's first worker loads is all its workers'."""
        return self.slices < self.workers

    def ranks(self) -> tuple[Path, int, float]:
        """Where leader and ranks meet, how many ranks there are, and how long each waits for the others."""
        name = hashlib.blake2b(self.engine.encode(), digest_size=8).hexdigest()
        return Path(tempfile.gettempdir()) / f"kvbm-{os.getuid()}-{name}", self.stages * self.slices, _JOIN


def _check(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        kind = _VALID.get(name)
        if kind is None:
            valid = ", ".join(_VALID)
            raise InvalidError(f"kv_connector_extra_config: KvbmConnector has no {name!r}; valid: {valid}")
        if not isinstance(value, kind):
            raise InvalidError(f"kv_connector_extra_config: {name} is a {kind.__name__}, not {value!r}")


def _settings(values: dict[str, Any], block_bytes: int) -> Settings:
    if "block_bytes" in values:
        raise InvalidError("block_bytes: leave it out, a block is one of vLLM's")
    return Settings.from_environment({**values, "block_bytes": block_bytes})


def _check_parallel(parallel: Any) -> None:
    if parallel.distributed_executor_backend == "external_launcher":
        raise InvalidError(
            "external_launcher gives each rank a scheduler of its own, and KvbmConnector has one for all: use mp or uni"
        )
    # Of context parallelism a block's tokens are spread over ranks, and its size is not the one that hashes are of.
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise InvalidError(f"KvbmConnector has no {name.removesuffix('_size').replace('_', ' ')}ism: set {name} to 1")


def _check_stages(config: Config, model: Any) -> None:
    """A block lies in slots of one number and size in all workers."""
    if config.stages == 1:
        return
    layers = model.get_total_num_hidden_layers()
    ends = [get_pp_indices(layers, stage, config.stages) for stage in range(config.stages)]
    sizes, group = [end - start for start, end in ends], config.groups[0]
    if len(set(sizes)) > 1:
        raise InvalidError(
            f"pipeline_parallel_size: KvbmConnector wants equally many layers in each stage, and vLLM makes stages of {sizes}: set it to a "
            f"divisor of the model's {layers} layers, and leave VLLM_PP_LAYER_PARTITION out"
        )
    if config.is_hybrid or len(group.layers) != sizes[0] or group.shares != sizes[0]:
        raise InvalidError(
            "pipeline_parallel_size: with several stages KvbmConnector wants a model all of whose layers keep keys and values of one "
            "size, and no draft model: set it to 1, and tensor_parallel_size higher"
        )


def _hash_tokens(cache: "KVCacheConfig", block_tokens: int) -> int:
    """Tokens behind which vLLM names what came so far: those of a block, or fewer (`--prefix-match-unit`)."""
    # 0.29 does not say it, and has the same for all that it serves here.
    tokens = getattr(cache, "hash_block_size", None) or block_tokens
    if block_tokens % tokens:
        raise InvalidError(
            f"vLLM hashes every {tokens} tokens, and a block has {block_tokens}: set --prefix-match-unit to a divisor of that"
        )
    return tokens


def _groups(cache: "KVCacheConfig") -> list[Group]:
    """By our numbers. A single one may keep what it likes: its chain is what is there of it."""
    specs = cache.kv_cache_groups
    if all(isinstance(_spec(spec), MambaSpec) for spec in specs):
        raise InvalidError(
            "this model keeps states alone, and KvbmConnector keeps them beside the blocks of full attention: use KvbmTier"
        )
    if len(specs) == 1:
        return [_group(0, specs[0], cache, window=0)]
    groups = [_group(index, spec, cache, _window(spec)) for index, spec in enumerate(specs)]
    if sum(group.window == 0 for group in groups) != 1:
        raise InvalidError("of several cache groups KvbmConnector wants exactly one to keep every block: use KvbmTier")
    if any(group.is_state and specs[group.index].kv_cache_spec.mamba_cache_mode != "align" for group in groups):
        raise InvalidError(
            "vLLM keeps no state at the end of a block, which is what KvbmConnector keeps: set --enable-prefix-caching"
        )
    if len({spec.kv_cache_spec.block_size for spec in specs}) != 1:
        raise InvalidError("KvbmConnector wants blocks of all cache groups to have as many tokens: use KvbmTier")
    return sorted(groups, key=lambda group: group.window != 0)


def _group(index: int, spec: "KVCacheGroupSpec", cache: "KVCacheConfig", window: int) -> Group:
    if isinstance(spec.kv_cache_spec, MambaSpec):
        # A page is as large as that of attention, and a state fills its beginning.
        parts = zip(spec.kv_cache_spec.shapes, spec.kv_cache_spec.dtypes)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
        return Group(index, tuple(spec.layer_names), (size,) * len(spec.layer_names), window, is_state=True)
    known = _pages(cache)
    # Where vLLM does not say it, 0.29, all layers are alike.
    pages = [known.get(name, spec.kv_cache_spec.page_size_bytes) for name in spec.layer_names]
    # Of one layer, which is all that the scheduler is told. Layers whose blocks are as large are split alike.
    kept = _spec(spec)
    is_padded = getattr(kept, "page_size_padded", None) is not None
    heads = 0 if is_padded else getattr(kept, "num_kv_heads", 0)
    tokens, size = spec.kv_cache_spec.block_size, getattr(kept, "head_size", 0)
    return Group(index, tuple(spec.layer_names), tuple(pages), window, heads=heads, tokens=tokens, head_size=size)


def _pages(cache: "KVCacheConfig") -> dict[str, int]:
    """Bytes of a block by layer. Specs do not tell them where layers differ: the worker is given one for all of them, and
    the scheduler that of one layer."""
    tensors = [tensor for tensor in cache.kv_cache_tensors if hasattr(tensor, "layer_stride")]
    # Either layers or blocks are what lies together.
    return {name: min(tensor.layer_stride, tensor.block_stride) for tensor in tensors for name in tensor.layers}


def _is_whole(cache: "KVCacheConfig") -> bool:
    """Whether a block is the same in all workers: MLA's latent is, of which all their heads are made."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    of_layers = [spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec] for spec in specs]
    return len(specs) == 1 and all(isinstance(spec, MLAAttentionSpec) for spec in of_layers[0])


def _spec(group: "KVCacheGroupSpec") -> Any:
    """That of one layer of the group."""
    kept = group.kv_cache_spec
    return kept.first_spec if isinstance(kept, UniformTypeKVCacheSpecs) else kept


def _keeps_all(group: "KVCacheGroupSpec") -> bool:
    return isinstance(_spec(group), FullAttentionSpec)


def _window(spec: "KVCacheGroupSpec") -> int:
    """In blocks, the one that is being filled not counted."""
    kept = spec.kv_cache_spec
    if isinstance(kept, SlidingWindowSpec) and not spec.is_eagle_group:
        return max(1, -(-(kept.sliding_window - 1) // kept.block_size))
    if isinstance(kept, FullAttentionSpec) and not spec.is_eagle_group:
        return 0
    if isinstance(kept, MambaSpec):
        return 1
    draft = " of a draft model" if spec.is_eagle_group else ""
    raise InvalidError(
        "of several cache groups KvbmConnector keeps full attention, sliding windows and states, and not "
        f"{type(kept).__name__}{draft}: use KvbmTier"
    )


def _serves_its_last_token(group: "KVCacheGroupSpec") -> bool:
    """Whether what is kept as of the end of a block does to compute the last token of that block again. A state has it in it; a
    window reaches back one token more from there, which may be in a block that was let go."""
    kept = _spec(group)
    if isinstance(kept, SlidingWindowSpec):
        return (kept.sliding_window - 1) % kept.block_size != 0
    return isinstance(kept, FullAttentionSpec)


def _check_states(vllm_config: "VllmConfig") -> None:
    # Then a block may hold a state behind tokens that were not accepted.
    if vllm_config.speculative_config is not None:
        raise InvalidError("KvbmConnector keeps no states of a model that decodes speculatively: use KvbmTier")


def _check_layerwise(config: Config, vllm_config: "VllmConfig") -> None:
    versions.check_shows_tables("layerwise")
    wanted = _why_not_by_layers(config, vllm_config)
    if wanted:
        raise InvalidError(f"kv_connector_extra_config: layerwise {wanted}")


def _why_not_by_layers(config: Config, vllm_config: "VllmConfig") -> str:
    """Why the layers of a step can neither wait for a load nor be saved one by one; empty: they can."""
    group = config.groups[0]
    if config.is_windowed or group.shares != len(group.layers) or config.is_shared:
        return "is for full attention in layers that are alike, of which each worker has a slice of its own: leave it out"
    if config.stages > 1:
        # The next step is under way in the first stage by then.
        return "is for steps that follow each other: leave it out, or set pipeline_parallel_size to 1"
    if vllm_config.speculative_config is not None:
        # vLLM asks what did not come before the step has waited for it. And a draft model computes its layers several times.
        return "is not for speculative decoding: leave it out"
    if vllm_config.scheduler_config.async_scheduling:
        # A step that uses what did not come would be under way before it is known.
        return "is for steps that follow each other: set async_scheduling to false (--no-async-scheduling)"
    return ""


_ELEMENTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _shadow_elements(config: Config, vllm_config: "VllmConfig", cache: "KVCacheConfig") -> str:
    versions.check_shows_tables("transfer.shadow_share")
    elements = _ELEMENTS.get(getattr(_spec(cache.kv_cache_groups[0]), "dtype", None))
    if config.is_windowed or not config.is_alone:
        wanted = "full attention, and one worker in the engine's process"
    elif vllm_config.speculative_config is not None:
        # What a draft model keeps of a block's last token depends on the next one.
        wanted = "no speculative decoding"
    elif elements is None:
        wanted = "keys and values of float32, float16 or bfloat16"
    else:
        return elements
    raise InvalidError(f"transfer.shadow_share: hits can be computed again and compared with {wanted}: set it to 0")


# As vLLM's `KVQuantMode` has them, which 0.29 does not.
_UNQUANTISED, _FP8 = 0, 1


def _dtype(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Of the model's numbers, and of those in its cache. Workers set `cache_dtype` when they make the model, and the scheduler does not
    hear of it: both find the same in the specs, but for which form of FP8 it is."""
    said = [str(vllm_config.model_config.dtype)]
    for group in kv_cache_config.kv_cache_groups:
        spec = _spec(group)
        said += (str(getattr(spec, name, None)) for name in ("dtype", "kv_quant_mode", "cache_dtype_str"))
        if isinstance(spec, MambaSpec):
            said += (f"{spec.mamba_type} {shape} {of}" for shape, of in zip(spec.shapes, spec.dtypes))
    said += ["e5m2"] if "e5m2" in vllm_config.cache_config.cache_dtype else []
    return " ".join(said)


def _fp8(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """The type of a cache of FP8 that has scales for whole layers, in the words that one of 16 bits has: then the two differ in
    nothing else."""
    if len(kv_cache_config.kv_cache_groups) != 1 or current_platform.is_fp8_fnuz():
        return None
    spec, asked = _spec(kv_cache_config.kv_cache_groups[0]), vllm_config.cache_config.cache_dtype
    if getattr(spec, "kv_quant_mode", None) != _FP8 or "e5m2" in asked or getattr(spec, "cache_dtype_str", None):
        return None
    said = f"{vllm_config.model_config.dtype} {torch.float8_e4m3fn} {_UNQUANTISED} None"
    return f"{said}, as {_order(vllm_config)}"


def _scales(layers: list[Any], order: str) -> list[float] | None:
    """For the keys of each layer and for its values, or for both where they are no axis of a block. `None`: layers do not say it,
    or differ more."""
    try:
        scales = [[layer._k_scale.item(), layer._v_scale.item()] for layer in layers]
    except (AttributeError, RuntimeError):
        # One of another kind, or with a scale for each head.
        return None
    if "kv" in order:
        return [scale for both in scales for scale in both]
    return [keys for keys, _ in scales] if all(keys == values for keys, values in scales) else None


def _fingerprint(vllm_config: "VllmConfig", config: Config, dtype: str, weights: str | None) -> dict[str, Any]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    layout = versions.kv_cache_layout(vllm_config)
    return {
        "model": model_name(str(model.model), weights),
        "weights": _weights(vllm_config, weights),
        "dtype": f"{dtype}, as {_order(vllm_config)}",
        "layouts": [_layout(group, layout, _inside_heads(vllm_config, group)) for group in config.groups],
        "tensor_world": config.slices,
        "pipeline_world": config.stages,
        "block_tokens": config.block_tokens,
        "rope_scaling": _positions(model),
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "hash_algorithm": algorithm,
        "hash_seed": _seed(algorithm),
    }


# How the numbers of a head lie on a CPU, whose kernels have all keys of a block before its values; and where that is not known.
_COLUMNS, _UNKNOWN = "kv(channel,token|token,channel)", "byte"


def _layout(group: Group, layout: str, inside: str | None = None) -> tuple[int, str, list[int], list[int]]:
    """How a block lies in our tiers: layer by layer, and within a layer as `layout` says, one letter for each axis of vLLM's
    tensors. By it engines of other numbers of workers find their heads, and of other sizes of blocks their tokens.

    `inside` says how the numbers of a head lie where tokens do not come one after the other."""
    layers = len(group.layers)
    if group.shares != layers:
        return layers, f"byte of layers of {group.layer_bytes} of {layout}", [group.block_bytes], [1]
    layer_bytes, rows = group.layer_bytes[0], group.heads * group.tokens
    if sorted(layout) != sorted("LBNHC") or not rows or layer_bytes % rows:
        return layers, f"layer,byte of {layout}", [layers, layer_bytes], [layer_bytes, 1]
    token, head = ("token", group.tokens), ("head", group.heads)
    numbers = 2 * group.head_size * rows
    if inside == _COLUMNS and numbers and layer_bytes % numbers == 0:
        kv = [(_COLUMNS, 2), ("", group.head_size), ("", group.tokens), ("byte", layer_bytes // numbers)]
        axes = [("layer", layers), head, *kv]
    elif inside is not None:
        axes = [("layer", layers), head, ("byte", layer_bytes // group.heads)]
    else:
        extents = {"N": token, "H": head, "C": ("byte", layer_bytes // rows)}
        axes = [("layer", layers), *(extents[letter] for letter in layout if letter in extents)]
    shape = [extent for _, extent in axes]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return layers, ",".join(name for name, _ in axes if name), shape, strides


def _inside_heads(vllm_config: "VllmConfig", group: Group) -> str | None:
    """How the numbers of a head lie, if tokens do not come one after the other there: on CPUs that goes by the kernel."""
    if not current_platform.is_cpu():
        return None
    kernel = versions.cpu_kernel(vllm_config, group.tokens, group.head_size) if group.head_size else None
    return _COLUMNS if kernel in ("vec", "vec16") else _UNKNOWN


def _order(vllm_config: "VllmConfig") -> str:
    """What says how the numbers of a layer's block are ordered, whose bytes we do not look into: vLLM's layout, which is
    settled before connectors are made, and the attention backend. Where none is asked for, the processor decides on it, and on
    CPUs on the order as well."""
    layout = versions.kv_cache_layout(vllm_config)
    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(attention, "backend", None)
    # By kind of layer, which not every version of vLLM has.
    kinds = getattr(attention, "backend_per_kind", None)
    if current_platform.is_cpu():
        processor = platform.machine() + (" amx" if torch.cpu._is_amx_tile_supported() else "")
    else:
        processor = current_platform.get_device_capability()
    backends = f"{backend or _choice()}{sorted(kinds.items()) if kinds else ''}"
    return f"{layout} {backends} {current_platform.device_type} {processor}"


def _choice() -> str:
    """What vLLM's own choice of a backend goes by beside what is named already. Which one it is only workers know, once they have
    the model."""
    try:
        return f"auto with flashinfer {metadata.version('flashinfer-python')}"
    except metadata.PackageNotFoundError:
        return "auto"


def _positions(model: Any) -> str:
    """What keys are rotated and scaled by."""
    rope, architectures = getattr(model.hf_text_config, "rope_parameters", None), model.architectures or []
    said = repr(_without_kind(rope))
    if "longrope" in repr(rope) or any(name.startswith("Llama4") for name in architectures):
        # These go by how long the engine lets prompts be; and Llama 4 by how it is to generate. Where vLLM makes them fit the
        # memory that is free, that comes after.
        is_fitted = getattr(model, "original_max_model_len", None) == -1
        longest = "what fits" if is_fitted else model.max_model_len
        said += f" up to {longest} {model.generation_config} {model.override_generation_config!r}"
    return said


def _without_kind(rope: Any) -> Any:
    """Some models replace the kind when they are made: by workers, and not by the scheduler. Files of the model that name another
    kind are other weights."""
    if not isinstance(rope, dict):
        return rope
    return {name: _without_kind(value) for name, value in sorted(rope.items()) if name not in ("type", "rope_type")}


# Settings of vLLM's model that say what is made of its weights, and of images, videos and sounds before they are its input.
_LOADED_BY = ("quantization", "quantization_config", "config_format", "model_impl", "model_class_overrides", "code_revision")
_MEDIA_READ_BY = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)


def _names_media(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM names images, videos and sounds by what they are. Without caches of its own it numbers them, from 1 in each
    process."""
    media = vllm_config.model_config.multimodal_config
    return media is None or media.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching


def _weights(vllm_config: "VllmConfig", named: str | None) -> str:
    """Names the weights, and what is made of them as they are loaded."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    overrides = model.hf_overrides
    if callable(overrides):
        overrides = f"{overrides.__module__}.{overrides.__qualname__}"
    cache = vllm_config.load_config.download_dir
    parts = [
        named or weights_at(str(model.model), model.revision, cache),
        *(f"{name} {getattr(model, name, None)!r}" for name in _LOADED_BY),
        f"overrides {overrides!r}",
        f"loaded {vllm_config.load_config.load_format}",
    ]
    if vllm_config.load_config.load_format == "dummy":
        # Weights that are made up are made of the seed.
        parts.append(f"seed {model.seed}")
    if getattr(model, "hf_config_path", None):
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        parts.append(f"configured by {model.hf_config_path} {named or weights_at(str(model.hf_config_path), revision, cache)}")
    if model.multimodal_config is not None:
        parts += (f"{name} {getattr(model.multimodal_config, name, None)!r}" for name in _MEDIA_READ_BY)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and str(draft.model) != str(model.model):
        parts.append(f"draft {draft.model} {named or weights_at(str(draft.model), draft.revision, cache)}")
    return ", ".join(parts)


def _seed(algorithm: str) -> bytes:
    """What the first block of every chain is hashed with: vLLM's own rule."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed.encode()
    # Of xxhash vLLM draws a seed for each process: no later process finds its blocks.
    return os.urandom(16) if algorithm.startswith("xxhash") else b"vllm-none-hash"
