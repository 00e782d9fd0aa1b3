"""`KvbmConnector`: vLLM's KV blocks in our tiers. docs/vllm.md shows how to configure it.

The scheduler's role has the manager, which decides what lies where; the worker's role adopts the KV tensors, between
which and the tiers blocks go straight. With one worker both are in one process, and the manager copies itself; with
several each worker is a rank that copies its heads of its stage's layers.

| module | holds |
|---|---|
| `adapters` | which weights a LoRA adapter has |
| `config` | what `kv_connector_extra_config` may say, and what the bytes of blocks depend on |
| `tensors` | where the pieces of a block lie in the KV tensors |
| `events` | what comes to the tiers and leaves them, as vLLM's KV events |
| `hints` | what a request says of itself, and what it is answered |
| `peers` | prompts that another engine has computed |
| `shadow` | hits that the engine computes again, to compare them |
| `scheduler` | the scheduler's role: look-ups, loads, saves, and which blocks are held for them |
| `stats` | the manager's metrics among vLLM's own |
| `worker` | the worker's role: adopts tensors, copies layers, passes on what has ended |
"""

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvbm_rs._native import flush_log
from kvbm_rs.vllm import versions
from kvbm_rs.vllm.connector.config import Config
from kvbm_rs.vllm.connector.scheduler import Scheduler
from kvbm_rs.vllm.connector.stats import PromMetrics, Stats
from kvbm_rs.vllm.connector.worker import Worker
from kvbm_rs.vllm.versions import KVConnectorTransferResults

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig

# `MultiConnector` finds the class of its parts' statistics by their names alone.
if "KvbmConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("KvbmConnector", __name__, "KvbmConnector")

__all__ = ["KvbmConnector"]


@versions.takes_what_is_new
class KvbmConnector(KVConnectorBase_V1, SupportsHMA):
    """Plugs the block manager into an unmodified vLLM.

    Set `kv_connector="KvbmConnector"`, `kv_connector_module_path="kvbm_rs.vllm.connector"`, and `kv_role` to `kv_both`; or to
    `kv_producer` or `kv_consumer`, where engines share the work and vLLM or a router goes by it.
    """

    # How settings are read.
    config: ClassVar[type[Config]] = Config

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            versions.warn("KvbmConnector")
        config = self.config(vllm_config, kv_cache_config)
        # One of them, by role: vLLM calls the methods of a role on that role's connector only.
        self._scheduler = Scheduler(config) if role == KVConnectorRole.SCHEDULER else None
        self._worker = Worker(config) if role == KVConnectorRole.WORKER else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A whole graph would not wait for layers.
        return bool(extra_config.get("layerwise", False))

    @property
    def requires_kv_delivery(self) -> bool:
        # A cache: what it does not keep is computed again.
        return False

    # The scheduler's role.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        # This binds its pool, too.
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # All that vLLM 0.29 shows.
        self._scheduler.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.look_up(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.load(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return self._scheduler.sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.stepped(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks that are still to be saved are held one by one.
        return False, self._scheduler.finish(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_blocks_soon()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.is_saving()

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    def get_kv_connector_stats(self) -> Stats | None:
        # Workers are asked as well.
        return self._scheduler.stats() if self._scheduler else None

    # The front end's, which has metrics and logs.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        return PromMetrics(*arguments)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._scheduler.events()

    # The worker's role.

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        self._worker.adopt(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        pass

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_saves(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        # The step is about to be told what it could not load.
        self._worker.finish_loads()
        self._worker.finish_saves()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        # What vLLM 0.29 calls in its place.
        results = self._worker.results()
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.stepped()

    # Both.

    def shutdown(self) -> None:
        for role in (self._scheduler, self._worker):
            if role is not None:
                role.shutdown()
        # vLLM ends its processes without asking Python to.
        flush_log()
