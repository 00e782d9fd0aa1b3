"""Our eviction inside vLLM's own CPU tier.

Two lines in the offloading connector's extra configuration, and nothing else changes:

    "eviction_policy": "HazardPolicy",
    "cache_policy_module_path": "kvbm_rs.vllm.policy",

vLLM keeps the chunks; which of them go when room is needed, `hazard` says, which learns from the traffic how soon
chunks of their kind return (docs/policies.md). It learns of a request when its first new chunk is stored and when it
ends, on the scheduler's thread, some microseconds each; fits run on a thread of their own.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvbm_rs._native import ChunkPolicy
from kvbm_rs.errors import UnavailableError
from kvbm_rs.vllm import versions


@versions.takes_what_is_new
class HazardPolicy(CachePolicy):
    """Evicts the chunk that brings the fewest expected hits for the time that it would be held.

    Only ends of chains go, so that no chunk outlives the one before it: a look-up would not reach it. Where a chunk
    came without that, it goes first.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        # Which chunk follows which is known nowhere else: a public method says it of a key, but not which keys there are.
        if "_offload_key_positions" not in ReqContext.__dataclass_fields__:
            raise UnavailableError("HazardPolicy needs the chunk positions that vLLM 0.32 and 0.33 keep for a request: use one of these")
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._policy = self._make_policy(cache_capacity)
        # For every chunk of every look-up and copy: without a frame of Python's between.
        self.get = self._chunks.get  # type: ignore[method-assign]
        self.mark_evictable = self._policy.mark_evictable  # type: ignore[method-assign]
        self.mark_non_evictable = self._policy.mark_non_evictable  # type: ignore[method-assign]

    def _make_policy(self, capacity: int) -> ChunkPolicy:
        return ChunkPolicy(capacity)

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk, or None."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Adds a chunk that is about to be written. vLLM 0.33 says for which request; `on_store_miss` has said it before."""
        self._chunks[key] = chunk
        self._policy.insert(key)

    def remove(self, key: OffloadKey) -> None:
        """Removes a chunk whose copy failed."""
        del self._chunks[key]
        self._policy.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Does nothing: a request counts once, by what vLLM tells of it at its end."""

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request has computed `keys`, and some may be inserted next."""
        self._policy.offer(req_context.req_id, req_context._offload_key_positions, list(keys))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """A request has ended: it used its whole prompt, also what the GPU had."""
        reused = [key for keys in key_groups for key in keys[:1] if key in reused_keys]
        self._policy.finish(req_context.req_id, req_context._offload_key_positions, reused)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Takes out exactly `n` chunks, or none at all and returns None."""
        keys = self._policy.evict(n, protected)
        if keys is None:
            return None
        return [(key, self._chunks.pop(key)) for key in keys]

    def clear(self) -> None:
        """Forgets all."""
        self._chunks.clear()
        self._policy.clear()

