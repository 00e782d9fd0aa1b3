"""`KvbmTier`: a tier of kvbm below vLLM's own CPU tier (`TieringOffloadingSpec`), which copies between it and the GPU.

All methods run on the scheduler's thread, and none waits for a medium but `drain_jobs` and `shutdown`: `kvbm_rs._native.Tier`
has threads of its own.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvbm_rs import Settings, logs
from kvbm_rs._native import Tier, flush_log
from kvbm_rs.errors import InvalidError, UnavailableError
from kvbm_rs.vllm import identity, logger, tier_metrics, versions
from kvbm_rs.vllm.samples import Reader

HIT, MISS = LookupResult.HIT, LookupResult.MISS
# One in eight chunks of the primary tier is left to stores while requests wait for what they were promised.
MARGIN = 8
# Seconds that a reset of vLLM's caches waits for copies.
_DRAIN_WAIT = 60.0


class _LookedUp:
    """What a request was told in a step, of a model with several cache groups; vLLM keeps it with the request."""

    __slots__ = ("keys", "step")

    def __init__(self) -> None:
        self.step = -1
        # Those that are hits.
        self.keys: Collection[bytes] = ()


@versions.takes_what_is_new
class KvbmTier(SecondaryTierManager):
    """Disk, objects and sharing below vLLM's CPU tier.

    Every field beside vLLM's own (`type`, `module_path`, `backpressure`) is a setting of docs/configuration.md, nested or by
    dotted path, and overrides `DYN_KVBM_*` variables, or one of these:

    Args:
        weights: what tells the model's weights from others under the same name; by default found out.
        weights_never_change: a reset of vLLM's caches (`reset_prefix_cache(reset_connector=True)`, sleep) does not mean
            other weights: what is stored stays. Else nothing from before is served again.
        shutdown_seconds: how long a shutdown may take to bring what is only in memory to its medium.
        locality: `LOCAL` or `REMOTE`, for requests that say which tiers may serve them.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        weights: str | None = None,
        weights_never_change: bool = False,
        shutdown_seconds: float = 10.0,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        versions.warn("KvbmTier")
        self.locality = Locality(locality) if locality is not None else None
        self._forget = not _flag("weights_never_change", weights_never_change)
        self._shutdown_seconds = shutdown_seconds
        config = offloading_spec.config
        tokens = [group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups]
        chunks = len(primary_kv_view)
        own = _settings(settings, self.block_size_bytes).of_replica(config.parallel.data_parallel_index)
        self._tier = Tier(
            primary_kv_view,
            tokens,
            max(1, chunks // MARGIN),
            own,
            identity.of_offloading(config, weights),
            (HIT, MISS),
        )
        logs.announce("KvbmTier", self._tier, own.remarks())
        if len(tokens) == 1:
            # Called for every key of every request that waits: a function of Python's would cost as much as all the rest.
            self.lookup = self._tier.lookup  # type: ignore[method-assign]
        self._reader = Reader(self._tier)
        # Requests and jobs that have not ended.
        self._under_way = 0
        self._step = 0
        # Keys of loads under way: what arrived is told by place.
        self._loads: dict[int, list[OffloadKey]] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        known = req_context.get_state(_LookedUp)
        if known is None:
            known = _LookedUp()
            req_context.set_state(known)
        if known.step != self._step:
            # All keys of the request at once, the first time in each step.
            known.keys = frozenset(self._tier.held(req_context.req_id, req_context._offload_key_positions))
            known.step = self._step
        return HIT if key in known.keys else MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        job, request = job_metadata, job_metadata.req_context
        self._under_way += 1
        positions = request._offload_key_positions
        self._tier.store(job.job_id, request.req_id, positions, job.keys, job.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        job, request = job_metadata, job_metadata.req_context
        self._under_way += 1
        self._loads[job.job_id] = list(job.keys)
        positions = request._offload_key_positions
        self._tier.load(job.job_id, request.req_id, positions, job.keys, job.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = self._tier.finished()
        self._under_way -= len(finished)
        return [self._result(*ended) for ended in finished]

    def _result(self, job: int, is_whole: bool, done: list[int] | None, seconds: float, size: int) -> JobResult:
        keys = self._loads.pop(job, None)
        # vLLM takes it for a tier that does not say, if there is none.
        arrived = [keys[place] for place in done] if keys and done else None
        return JobResult(job, is_whole, arrived, transfer_time=seconds, transfer_bytes=size)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._under_way += 1
        if self._tier.lacks_beginnings():
            # What is stored hangs on what comes before it. vLLM offers a chunk only once while it has it itself.
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._under_way -= 1
        self._tier.end_request(req_context.req_id, req_context._offload_key_positions)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._step += 1
        self._tier.end_step(list(context.new_req_ids))

    def drain_jobs(self) -> None:
        # What requests were told holds no more.
        self._step += 1
        # No other process knows which weights are served from here on: the files have others, or will have.
        left, unknown = self._tier.drain(_DRAIN_WAIT, os.urandom(16) if self._forget else None)
        if unknown is not None:
            logger.warning("the new epoch is not noted everywhere yet: %s", unknown)
        if left:
            # vLLM is about to give the memory of these copies to others, and must not. Its reset ends with this.
            raise UnavailableError(
                f"{left} copies have not ended in {_DRAIN_WAIT:.0f} s, so vLLM's CPU tier is not emptied: a medium hangs, repeat "
                "the reset when it goes on"
            )

    def shutdown(self) -> None:
        left, copies = self._tier.close(self._shutdown_seconds)
        if left:
            logger.warning("%d chunks did not get to their medium in %.0f s", left, self._shutdown_seconds)
        # vLLM ends its processes without asking Python to.
        flush_log()
        if copies:
            # vLLM keeps the primary tier's memory then.
            raise RuntimeError(f"{copies} copies still use the primary tier: a medium hangs")

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return tier_metrics.definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        found = self._reader.read(is_at_rest=self._under_way == 0)
        return None if found is None else tier_metrics.stats(found)

    def stats(self) -> dict[str, int]:
        """Counts since the start; blocks are chunks."""
        return dict(self._tier.stats())


def _settings(values: dict[str, Any], chunk_bytes: int) -> Settings:
    if "block_bytes" in values:
        raise InvalidError("block_bytes: leave it out, a block is a chunk of vLLM's")
    return Settings.from_environment(values | {"block_bytes": chunk_bytes})


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidError(f"{name}: {value!r} is neither true nor false")
    return value
