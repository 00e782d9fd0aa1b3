"""An engine without a model: vLLM's own scheduler and a connector, over KV tensors in which nothing computes.

Each request says one token in a step. What a connector costs the scheduler is all there is to it.
"""

import tempfile
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import models
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

# Tokens of a block, as on a GPU.
BLOCK = 16
# Of each stage.
LAYERS = 2
_SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
BLOCK_BYTES = LAYERS * _SPEC.page_size_bytes

LONGEST = 32_768
# The token that all say.
SAID = 3


class Modelless:
    """`transfer` is vLLM's `kv_transfer_config`. With `is_async` the next step is scheduled before one has ended."""

    def __init__(
        self, transfer: dict[str, Any], blocks: int, requests: int, is_async: bool = False, **arguments: Any
    ) -> None:
        config = _config(transfer, blocks, requests, **arguments)
        cache = _cache(blocks)
        config.cache_config.num_gpu_blocks = blocks
        # CPUs have none, whatever is said.
        config.scheduler_config.async_scheduling = is_async
        self._most, self._under_way = 1 + is_async, deque[tuple[SchedulerOutput, ModelRunnerOutput]]()
        self._worker = None
        with set_current_vllm_config(config):
            if transfer["kv_connector"] != "OffloadingConnector":
                self._worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
                tensors = torch.zeros(LAYERS, blocks, 2, BLOCK, 1, 32, dtype=torch.bfloat16)
                self._worker.register_kv_caches(dict(zip(layers_of(0), tensors)))
            self._schedule(config, cache)

    def _schedule(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self._hasher = _hasher(hash_block_size)
        # Called when a step computes a layer, by its number, and when it has computed all of them.
        self.compute: Callable[[int], None] = lambda layer: None
        self.end_layers: Callable[[], None] = lambda: None

    def add(self, name: str, prompt: list[int], tokens: int = LONGEST, params: dict[str, Any] | None = None) -> Request:
        """`params` are its `kv_transfer_params`."""
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        said = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, **extra)
        request = Request(name, prompt, said, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def finish(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Begins a step, and ends those that are too many then."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        said = [[SAID] if self._is_at_its_end(name) else [] for name in names]
        at = {name: number for number, name in enumerate(names)}
        came = self._transfers(output)
        self._under_way.append(
            (output, ModelRunnerOutput(names, at, sampled_token_ids=said, kv_connector_output=came))
        )
        if len(self._under_way) >= self._most:
            self.scheduler.update_from_output(*self._under_way.popleft())
        return output

    def _is_at_its_end(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def _transfers(self, output: SchedulerOutput) -> KVConnectorOutput:
        """What the connector's workers say behind a step."""
        told = output.kv_connector_metadata
        if self._worker is not None:
            return transfers_of(self._worker, output, self._forward)
        # vLLM's own wants a GPU: each copy has ended when it was asked for.
        ended = OffloadingWorkerMetadata({job: 1 for job in (*told.load_jobs, *told.store_jobs)})
        loaded = {job.req_id for job in told.load_jobs.values()}
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=ended)

    def _forward(self) -> None:
        for number, name in enumerate(layers_of(0)):
            self._worker.wait_for_layer_load(name)
            self.compute(number)
            self._worker.save_kv_layer(name, None, None)
        self.end_layers()

    def close(self) -> None:
        self.scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


def layers_of(stage: int) -> list[str]:
    return [f"model.layers.{number}.attn" for number in range(stage * LAYERS, (stage + 1) * LAYERS)]


def transfers_of(worker: Any, output: SchedulerOutput, forward: Callable[[], None] = lambda: None) -> KVConnectorOutput:
    """What a worker's connector says behind a step."""
    worker.bind_connector_metadata(output.kv_connector_metadata)
    if output.has_sync_kv_loads:
        worker.start_load_kv(None)
    try:
        if output.num_scheduled_tokens:
            forward()
    finally:
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
    results = worker.get_transfer_results(output.finished_req_ids)
    return KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )


@cache
def _hasher(tokens: int) -> Any:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    return get_request_block_hasher(tokens, hash_function)


@cache
def _models() -> tempfile.TemporaryDirectory:
    """Engines of one process have one model: those that differ read nothing at each other."""
    return tempfile.TemporaryDirectory()


def _config(transfer: dict[str, Any], blocks: int, requests: int, **arguments: Any) -> VllmConfig:
    layers = LAYERS * arguments.get("pipeline_parallel_size", 1)
    config = EngineArgs(
        model=str(models.make(Path(_models().name, "bench"), "bench")),
        skip_tokenizer_init=True,
        load_format="dummy",
        block_size=BLOCK,
        max_model_len=LONGEST,
        hf_overrides={"max_position_embeddings": LONGEST, "num_hidden_layers": layers},
        max_num_seqs=requests,
        num_gpu_blocks_override=blocks,
        kv_transfer_config=transfer,
        **{"max_num_batched_tokens": LONGEST, **arguments},
    ).create_engine_config()
    # On a CPU it is `mp`, whatever is said.
    if config.parallel_config.world_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


def _cache(blocks: int, stage: int = 0) -> KVCacheConfig:
    layers, page = layers_of(stage), _SPEC.page_size_bytes
    tensor = KVCacheTensor(page * blocks * LAYERS, layers, layer_stride=page * blocks, block_stride=page)
    return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(layers, _SPEC)], hash_block_size=BLOCK)
